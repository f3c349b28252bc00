"""How `sonnx codegen` works: lowering reads a model, emitter makes statements of nodes, program puts a module around them."""
