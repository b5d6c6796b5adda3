"""Does what a Program says, with real tensors; ``runtime.executor`` is the entry."""
