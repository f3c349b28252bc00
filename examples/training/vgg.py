"""Retrain a VGG: python examples/training/vgg.py [MODEL.onnx] [--data CIFAR-10] [--epochs 10] [--output NEW.onnx].

The published files (vgg16-7.onnx, vgg19-bn-7.onnx, ...) end with a product of 4096 features, which a new head replaces.
"""

import _image
import nets

if __name__ == "__main__":
    parser = _image.options(__doc__)
    parser.add_argument("--depth", type=int, choices=sorted(nets.VGG.stages), default=16, help="of a random net")
    parser.add_argument("--bn", action="store_true", help="a random net with batch normalization")
    args = parser.parse_args()
    _image.run(args, lambda: nets.VGG(args.depth, args.width, 1000, args.bn))
