"""Implementation of `sonnx codegen`: lowering reads a model, emitter turns nodes into statements, program writes the module."""
