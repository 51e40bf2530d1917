"""The optional build hook of the wheel: mypyc compiles the chain of a simulated step (`pyproject.toml` lists it).

Off unless HATCH_BUILD_HOOKS_ENABLE=1. It builds beside the sources, so build in a copy: `make compiled`.
"""

from hatch_mypyc import plugin


class CompiledStep(plugin.MypycBuildHook):
    """hatch-mypyc, for a wheel whose second package is in a folder of its own: it would build all of it there."""

    @property
    def package_source(self) -> str:
        return ""
