"""The least-squares form: the score is not bounded, and the loss is the squared distance from the label."""

from singa import autograd, layer

from . import gan_mlp


class LSGAN_MLP(gan_mlp.GAN_MLP):
    def __init__(self, noise_size=100, feature_size=784, hidden_size=128):
        super().__init__(noise_size, feature_size, hidden_size)
        self.mse_loss = layer.MeanSquareError()

    def forward_dis(self, x):
        return self.dis_net_fc_1(self.dis_net_relu_0(self.dis_net_fc_0(x)))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.mse_loss(out, y)
        for p, g in autograd.backward(loss):
            if "gen_net" in p.name:
                self.optimizer.apply(p.name, p, g)
        return out, loss

    def train_one_batch_dis(self, x, y):
        out = self.forward_dis(x)
        loss = self.mse_loss(out, y)
        for p, g in autograd.backward(loss):
            if "dis_net" in p.name:
                self.optimizer.apply(p.name, p, g)
        return out, loss


def create_model(pretrained=False, **kwargs):
    return LSGAN_MLP(**kwargs)
