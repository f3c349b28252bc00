"""Retrain a ResNet: python examples/training/resnet.py [MODEL.onnx] [--data CIFAR-10] [--epochs 10] [--output NEW.onnx].

The published files (resnet18-v1-7.onnx to resnet152-v2-7.onnx) end with a Gemm of 512 (18, 34) or 2048 features, which a new
head replaces.
"""

import _image
import nets

if __name__ == "__main__":
    parser = _image.options(__doc__)
    parser.add_argument("--depth", type=int, choices=sorted(nets.ResNet.stages), default=18, help="of a random net")
    parser.add_argument("--version", type=int, choices=(1, 2), default=1, help="of a random net")
    args = parser.parse_args()
    _image.run(args, lambda: nets.ResNet(args.depth, args.width, 1000, args.version))
