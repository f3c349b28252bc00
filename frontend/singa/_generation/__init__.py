"""Text generation from folders of onnxruntime-genai and Optimum: configuration, tokens, runs of the model, searches."""
