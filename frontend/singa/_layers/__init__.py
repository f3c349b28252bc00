"""The base class of layers and larger layers; the public `layer` lists them."""
