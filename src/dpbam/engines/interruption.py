"""What an interrupted pass leaves on in torch and Python, switched off again.

Ctrl-C may come between the last line of a ``with`` block and its end. What the block switched on
would stay: a mode, through which every later operation of the process passes and is refused; a
level of vmap; gradients or the garbage collector off.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _autograd, _functorch


@contextmanager
def switched_back() -> Iterator[None]:
    """Restore modes, transforms, gradients and garbage collection if the block is interrupted.

    If an operation under a forgotten mode has ended in an error of its own, the Ctrl-C is raised
    instead.

    Example:
        >>> with switched_back():
        ...     _ = torch._C._set_grad_enabled(False)
        ...     raise RuntimeError("interrupted")
        Traceback (most recent call last):
        ...
        RuntimeError: interrupted
        >>> torch.is_grad_enabled()
        True
    """
    modes, level = torch._C._len_torch_function_stack(), _functorch.get_dynamic_layer_stack_depth()
    recording, collecting = torch.is_grad_enabled(), gc.isenabled()
    no_hooks = _autograd._saved_tensors_hooks_get_disabled_error_message()
    handled = sys.exc_info()[1]  # by the caller, for another reason
    try:
        yield
    except BaseException as error:
        while torch._C._len_torch_function_stack() > modes:
            torch._C._pop_torch_function_stack()
        if _functorch.get_dynamic_layer_stack_depth() > level:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(level)
        torch.set_grad_enabled(recording)
        if collecting:
            gc.enable()
        if no_hooks is None:
            _autograd._saved_tensors_hooks_enable()
        interrupt = _interrupt_in(error, handled)
        if interrupt is None or interrupt is error:
            raise
        raise interrupt from None


def _interrupt_in(
    error: BaseException | None, handled: BaseException | None
) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that an error goes back to, before one that was being handled, or None."""
    while error is not None and error is not handled:
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__context__
    return None
