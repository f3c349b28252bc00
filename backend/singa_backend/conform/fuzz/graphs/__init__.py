"""Generated models of many nodes: drawn node by node, judged by onnxruntime, and located at the first node that differs."""
