"""Residual blocks in lists: a stage is a function of the layers in it, and the layers are registered afterwards."""

from singa import layer

from . import cnn


def conv3x3(inputs, outputs, stride=1):
    return layer.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class BasicBlock(layer.Layer):
    expansion = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = layer.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = layer.BatchNorm2d(planes)
        self.relu1 = layer.ReLU()
        self.add = layer.Add()
        self.relu2 = layer.ReLU()
        self.downsample = downsample
        self.stride = stride

    def forward(self, x):
        residual = x if self.downsample is None else self.downsample(x)
        out = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.add(self.bn2(self.conv2(out)), residual))


class Bottleneck(layer.Layer):
    expansion = 4

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = layer.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = layer.BatchNorm2d(planes)
        self.relu1 = layer.ReLU()
        self.conv2 = layer.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = layer.BatchNorm2d(planes)
        self.relu2 = layer.ReLU()
        self.conv3 = layer.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = layer.BatchNorm2d(planes * self.expansion)
        self.add = layer.Add()
        self.relu3 = layer.ReLU()
        self.downsample = downsample

    def forward(self, x):
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu3(self.add(out, x if self.downsample is None else self.downsample(x)))


class ResNet(cnn.CNN):
    def __init__(self, block, layers, num_classes=10, num_channels=3):
        super(cnn.CNN, self).__init__()
        self.inplanes = 4
        self.num_classes = num_classes
        self.input_size = 32
        self.dimension = 4
        self.conv1 = layer.Conv2d(num_channels, 4, 7, stride=2, padding=3, bias=False)
        self.bn1 = layer.BatchNorm2d(4)
        self.relu = layer.ReLU()
        self.maxpool = layer.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1, layers1 = self._make_layer(block, 4, layers[0])
        self.layer2, layers2 = self._make_layer(block, 8, layers[1], stride=2)
        self.avgpool = layer.AvgPool2d(4, stride=1)
        self.flatten = layer.Flatten()
        self.fc = layer.Linear(num_classes)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()
        self.register_layers(*layers1, *layers2)

    def _make_layer(self, block, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            conv = layer.Conv2d(self.inplanes, planes * block.expansion, 1, stride=stride, bias=False)
            bn = layer.BatchNorm2d(planes * block.expansion)

            def downsample(x):
                return bn(conv(x))

        made = [block(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * block.expansion
        made += [block(self.inplanes, planes) for _ in range(1, blocks)]

        def forward(x):
            for step in made:
                x = step(x)
            return x

        return forward, made

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(self.flatten(self.avgpool(x)))


def resnet18(pretrained=False, **kwargs):
    return ResNet(BasicBlock, [1, 2], **kwargs)


def resnet50(pretrained=False, **kwargs):
    return ResNet(Bottleneck, [1, 1], **kwargs)


__all__ = ["ResNet", "resnet18", "resnet50"]
