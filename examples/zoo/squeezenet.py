"""SqueezeNet 1.1 (opset 7): the five most probable of ImageNet's 1000 classes of a picture.

    python examples/zoo/squeezenet.py cat.jpg --model squeezenet1.1-7.onnx --labels synset.txt --plot result.png

The picture is stretched to 224 x 224, scaled to 0 to 1 and normalised by the mean and standard deviation of ImageNet.
"""

from images import Classifier, stretched
from published import start

MODEL = Classifier("squeezenet1.1-7.onnx", crop=lambda image: stretched(image, 224))

if __name__ == "__main__":
    start(lambda: MODEL.main(__doc__))
