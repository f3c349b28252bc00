"""VGG-16 (opset 7): the five most probable of ImageNet's 1000 classes of a picture.

    python examples/zoo/vgg16.py cat.jpg --model vgg16-7.onnx --labels synset.txt --plot result.png

The short side is resized to 256 and the centre, 224 x 224, is scaled to 0 to 1 and normalised by the mean and standard deviation
of ImageNet.
"""

from images import Classifier
from published import start

MODEL = Classifier("vgg16-7.onnx")

if __name__ == "__main__":
    start(lambda: MODEL.main(__doc__))
