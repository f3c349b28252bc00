"""ShuffleNet v1 (opset 9): the five most probable of ImageNet's 1000 classes of a picture.

    python examples/zoo/shufflenetv1.py cat.jpg --model shufflenet-9.onnx --labels synset.txt --plot result.png

The short side is resized to 256 and the centre, 224 x 224, is scaled to 0 to 1 and normalised by the mean and standard deviation
of ImageNet.  The model ends with a softmax.
"""

from images import Classifier
from published import start

MODEL = Classifier("shufflenet-9.onnx")

if __name__ == "__main__":
    start(lambda: MODEL.main(__doc__))
