"""Retrain a MobileNetV2: python examples/training/mobilenet.py [MODEL.onnx] [--data CIFAR-10] [--epochs 10] [--output NEW.onnx].

The published file (mobilenetv2-7.onnx) ends with a product of 1280 features, which a new head replaces.
"""

import _image
import nets

if __name__ == "__main__":
    args = _image.options(__doc__).parse_args()
    _image.run(args, lambda: nets.MobileNetV2(args.width, 1000))
