"""A generator and a discriminator in one model; a step applies the gradients of one of them."""

from singa import autograd, layer, model


class GAN_MLP(model.Model):
    def __init__(self, noise_size=100, feature_size=784, hidden_size=128):
        super().__init__()
        self.noise_size, self.feature_size, self.hidden_size = noise_size, feature_size, hidden_size
        self.gen_net_fc_0 = layer.Linear(hidden_size)
        self.gen_net_relu_0 = layer.ReLU()
        self.gen_net_fc_1 = layer.Linear(feature_size)
        self.gen_net_sigmoid_1 = layer.Sigmoid()
        self.dis_net_fc_0 = layer.Linear(hidden_size)
        self.dis_net_relu_0 = layer.ReLU()
        self.dis_net_fc_1 = layer.Linear(1)
        self.dis_net_sigmoid_1 = layer.Sigmoid()
        self.binary_cross_entropy = layer.BinaryCrossEntropy()

    def forward(self, x):
        return self.forward_dis(self.forward_gen(x))

    def forward_gen(self, x):
        return self.gen_net_sigmoid_1(self.gen_net_fc_1(self.gen_net_relu_0(self.gen_net_fc_0(x))))

    def forward_dis(self, x):
        return self.dis_net_sigmoid_1(self.dis_net_fc_1(self.dis_net_relu_0(self.dis_net_fc_0(x))))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.binary_cross_entropy(out, y)
        for p, g in autograd.backward(loss):
            if "gen_net" in p.name:
                self.optimizer.apply(p.name, p, g)
        return out, loss

    def train_one_batch_dis(self, x, y):
        out = self.forward_dis(x)
        loss = self.binary_cross_entropy(out, y)
        for p, g in autograd.backward(loss):
            if "dis_net" in p.name:
                self.optimizer.apply(p.name, p, g)
        self.optimizer(loss)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


def create_model(pretrained=False, **kwargs):
    return GAN_MLP(**kwargs)
