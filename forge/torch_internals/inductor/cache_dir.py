"""The folder of Inductor's caches."""

from torch._inductor.runtime.cache_dir_utils import cache_dir as cache_dir
