"""Five convolutions and dense layers with dropout, as AlexNet."""

from singa import layer

from . import cnn


class AlexNet(cnn.CNN):
    def __init__(self, num_classes=10, num_channels=1):
        super(cnn.CNN, self).__init__()
        self.num_classes = num_classes
        self.input_size = 63
        self.dimension = 4
        self.conv1 = layer.Conv2d(num_channels, 16, 11, stride=4, padding=2)
        self.conv2 = layer.Conv2d(16, 16, 5, padding=2)
        self.conv3 = layer.Conv2d(16, 16, 3, padding=1)
        self.conv4 = layer.Conv2d(16, 16, 3, padding=1)
        self.conv5 = layer.Conv2d(16, 16, 3, padding=1)
        self.linear1 = layer.Linear(64)
        self.linear2 = layer.Linear(64)
        self.linear3 = layer.Linear(num_classes)
        self.pooling1 = layer.MaxPool2d(2, 2, padding=0)
        self.pooling2 = layer.MaxPool2d(2, 2, padding=0)
        self.pooling3 = layer.MaxPool2d(2, 2, padding=0)
        self.avg_pooling1 = layer.AvgPool2d(1, 1, padding=0)
        for i in range(1, 8):
            setattr(self, f"relu{i}", layer.ReLU())
        self.flatten = layer.Flatten()
        self.dropout1 = layer.Dropout()
        self.dropout2 = layer.Dropout()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.pooling1(self.relu1(self.conv1(x)))
        y = self.pooling2(self.relu2(self.conv2(y)))
        y = self.relu3(self.conv3(y))
        y = self.relu4(self.conv4(y))
        y = self.pooling3(self.relu5(self.conv5(y)))
        y = self.flatten(self.avg_pooling1(y))
        y = self.relu6(self.linear1(self.dropout1(y)))
        y = self.relu7(self.linear2(self.dropout2(y)))
        return self.linear3(y)


def create_model(pretrained=False, **kwargs):
    return AlexNet(**kwargs)


__all__ = ["AlexNet", "create_model"]
