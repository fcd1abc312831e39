"""What becomes of this package where a name on which it depends is missing.

    python without_names.py torch|jax

takes each name in that `private.py` for missing, each in a fork of this process, and prints it with "right" where the program
below gave what it should, and with the text of an ImportError that it raised.  Those of jax-triton are left out: it cannot be
imported without CUDA.
"""

import contextlib
import importlib
import os
import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]


def source(framework: str) -> str:
    return (ROOT / {"torch": "torch_bridge", "jax": "jax_flash_jvp"}[framework] / "private.py").read_text()


def names(framework: str) -> list[str]:
    return sorted({*re.findall(r'"((?:torch|jax|triton.runtime)\.[\w.]+)"', source(framework))})


def without(framework: str, path: str) -> None:
    """Puts a `private` in place that asks for another name."""
    name = {"torch": "torch_bridge.private", "jax": "jax_flash_jvp.private"}[framework]
    text = source(framework).replace(f'"{path}"', f'"{path}_gone"')
    assert text != source(framework)
    module = types.ModuleType(name)
    module.__package__ = name.partition(".")[0]
    sys.modules[name] = module
    exec(compile(text, name, "exec"), vars(module))


def torch_program() -> None:
    import torch
    from torch.func import grad, jvp, vmap

    from torch_bridge import compute, flash_attn_func, patch, private
    from torch_bridge import scaled_dot_product_attention as attend

    torch.manual_seed(0)
    x, t = ([torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)] for _ in range(2))

    def naive(q, k, v):
        return (q @ k.mT / 2).softmax(-1) @ v

    def leaf(f):
        a = x[0].clone().requires_grad_()
        f(a, *x[1:]).sin().sum().backward()
        return a.grad

    programs = (
        lambda f: f(*x),
        leaf,
        lambda f: jvp(f, tuple(x), tuple(t))[1],
        lambda f: grad(lambda q: jvp(lambda q: f(q, *x[1:]), (q,), (t[0],))[1].sin().sum())(x[0]),
        lambda f: vmap(f)(*(a[:, None] for a in x)),
    )
    on_nvidia = compute.on_nvidia
    for short_cuts in (False, True):  # past the dispatcher, as on a GPU, to the reference
        if short_cuts:
            compute.on_nvidia = lambda a: True
            compute._launch = lambda: types.SimpleNamespace(planned=lambda *_: None, served=lambda _: False)
        for program in programs:
            torch.testing.assert_close(program(attend), program(naive), rtol=1e-9, atol=1e-9)
    compute.on_nvidia = on_nvidia
    with patch():
        assert torch.nn.functional.scaled_dot_product_attention is attend
    flash_attn_func(*(a.transpose(1, 2) for a in x))
    say("right")
    private.inductor_config()
    with contextlib.suppress(RuntimeError):  # there is none
        private.process_group("nobody")


def jax_program() -> None:
    import jax_flash_jvp.attention

    say("right")
    import jax_flash_jvp.interpret  # noqa: F401


def say(what: str) -> None:
    print(what, end=" ", flush=True)


def main(framework: str) -> None:
    program = {"torch": torch_program, "jax": jax_program}[framework]
    modules = {
        "torch": ("torch._inductor.config", "torch.nn.attention.flex_attention", "torch.utils.flop_counter"),
        "jax": ("jax.interpreters.mlir", "jax.experimental.custom_partitioning", "triton.runtime.interpreter"),
    }
    for module in modules[framework]:  # all that the forks would import
        importlib.import_module(module)
    for path in names(framework):
        say(path)
        process = os.fork()
        if not process:
            try:
                without(framework, path)
                program()
            except ImportError as error:
                say(str(error))
            except BaseException as error:
                say(repr(error))
            os._exit(0)
        os.waitpid(process, 0)
        print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
