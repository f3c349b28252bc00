"""Two convolutions, two dense layers, for images of 28 x 28."""

from singa import layer, model


class CNN(model.Model):
    def __init__(self, num_classes=10, num_channels=1):
        super(CNN, self).__init__()
        self.num_classes = num_classes
        self.input_size = 28
        self.dimension = 4
        self.conv1 = layer.Conv2d(num_channels, 4, 5, padding=0, activation="RELU")
        self.conv2 = layer.Conv2d(4, 6, 5, padding=0, activation="RELU")
        self.linear1 = layer.Linear(20)
        self.linear2 = layer.Linear(num_classes)
        self.pooling1 = layer.MaxPool2d(2, 2, padding=0)
        self.pooling2 = layer.MaxPool2d(2, 2, padding=0)
        self.relu = layer.ReLU()
        self.flatten = layer.Flatten()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()
        self.sigmoid = layer.Sigmoid()

    def forward(self, x):
        y = self.pooling1(self.conv1(x))
        y = self.flatten(self.pooling2(self.conv2(y)))
        return self.linear2(self.relu(self.linear1(y)))

    def train_one_batch(self, x, y, dist_option, spars):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        if dist_option == "plain":
            self.optimizer(loss)
        elif dist_option == "half":
            self.optimizer.backward_and_update_half(loss)
        elif dist_option == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss)
        elif dist_option == "sparseTopK":
            self.optimizer.backward_and_sparse_update(loss, topK=True, spars=spars)
        elif dist_option == "sparseThreshold":
            self.optimizer.backward_and_sparse_update(loss, topK=False, spars=spars)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


def create_model(pretrained=False, **kwargs):
    return CNN(**kwargs)


__all__ = ["CNN", "create_model"]
