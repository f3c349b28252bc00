"""Blocks of separable convolutions with skips; the layers of a block are a list, of which some are cut off or replaced."""

from singa import layer

from . import cnn


class Block(layer.Layer):
    def __init__(self, in_filters, out_filters, reps, strides=1, padding=0, start_with_relu=True, grow_first=True):
        super().__init__()
        if out_filters != in_filters or strides != 1:
            self.skip = layer.Conv2d(in_filters, out_filters, 1, stride=strides, padding=padding, bias=False)
            self.skipbn = layer.BatchNorm2d(out_filters)
        else:
            self.skip = None
        self.layers = []
        filters = in_filters
        if grow_first:
            self.layers.append(layer.ReLU())
            self.layers.append(layer.SeparableConv2d(in_filters, out_filters, 3, stride=1, padding=1, bias=False))
            self.layers.append(layer.BatchNorm2d(out_filters))
            filters = out_filters
        for _ in range(reps - 1):
            self.layers.append(layer.ReLU())
            self.layers.append(layer.SeparableConv2d(filters, filters, 3, stride=1, padding=1, bias=False))
            self.layers.append(layer.BatchNorm2d(filters))
        if not grow_first:
            self.layers.append(layer.ReLU())
            self.layers.append(layer.SeparableConv2d(in_filters, out_filters, 3, stride=1, padding=1, bias=False))
            self.layers.append(layer.BatchNorm2d(out_filters))
        if not start_with_relu:
            self.layers = self.layers[1:]
        else:
            self.layers[0] = layer.ReLU()
        if strides != 1:
            self.layers.append(layer.MaxPool2d(3, strides, padding + 1))
        self.register_layers(*self.layers)
        self.add = layer.Add()

    def forward(self, x):
        y = self.layers[0](x)
        for step in self.layers[1:]:
            if isinstance(y, tuple):
                y = y[0]
            y = step(y)
        skip = x if self.skip is None else self.skipbn(self.skip(x))
        return self.add(y, skip)


class Xception(cnn.CNN):
    def __init__(self, num_classes=10, num_channels=3):
        super(cnn.CNN, self).__init__()
        self.num_classes = num_classes
        self.input_size = 40
        self.dimension = 4
        self.conv1 = layer.Conv2d(num_channels, 4, 3, 2, 0, bias=False)
        self.bn1 = layer.BatchNorm2d(4)
        self.relu1 = layer.ReLU()
        self.block1 = Block(4, 8, 2, 2, padding=0, start_with_relu=False, grow_first=True)
        self.block2 = Block(8, 8, 2, 1, start_with_relu=True, grow_first=True)
        self.block3 = Block(8, 12, 2, 2, start_with_relu=True, grow_first=False)
        self.conv3 = layer.SeparableConv2d(12, 16, 3, 1, 1)
        self.bn3 = layer.BatchNorm2d(16)
        self.relu3 = layer.ReLU()
        self.relu4 = layer.ReLU()
        self.globalpooling = layer.MaxPool2d(5, 1)
        self.fc = layer.Linear(num_classes)
        self.flatten = layer.Flatten()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def features(self, input):
        x = self.relu1(self.bn1(self.conv1(input)))
        x = self.block3(self.block2(self.block1(x)))
        return self.bn3(self.conv3(self.relu3(x)))

    def logits(self, features):
        return self.fc(self.flatten(self.globalpooling(self.relu4(features))))

    def forward(self, input):
        return self.logits(self.features(input))


def create_model(pretrained=False, **kwargs):
    return Xception(**kwargs)


__all__ = ["Xception", "create_model"]
