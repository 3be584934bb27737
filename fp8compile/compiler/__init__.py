"""From torch.compile to compiled code: the pipeline, Inductor's hooks, cache keys, reports beside the cache."""
