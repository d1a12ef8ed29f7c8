"""What unmodified SGLang lacks to run on a CPU without AMX and without its own kernels: a platform, an attention backend that
follows a context-parallel strategy, and collectives for gloo. Chosen by `SGLANG_PLATFORM=vertumnus_cpu`.

Servers of a pool never load this: it is a distribution of its own that only `make sglang-cpu` installs.
"""


def platform() -> str:
    """Entry point of `sglang.srt.platforms`: where the platform class is."""
    return "vertumnus_sglang_cpu.platform.CpuPlatform"
