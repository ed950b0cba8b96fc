"""LazyJAX: fine-tune language models that do not fit on the GPU."""

__version__ = "0.1.0"
