"""The operators of SINGA's API, declared in ONNX's operators; the public `autograd` lists them."""
