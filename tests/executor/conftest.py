"""One thread everywhere: with other runnable processes, OpenMP barriers wait for whole scheduler quanta."""

try:
    import torch
except ImportError:  # each test file skips itself with the reason
    pass
else:
    torch.set_num_threads(1)
