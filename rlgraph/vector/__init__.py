def make_vec(*a, **k): raise NotImplementedError
