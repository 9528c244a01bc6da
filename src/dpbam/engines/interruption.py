"""What an interrupted pass leaves on in torch and Python, switched off again.

Ctrl-C may come between the last line of a ``with`` block and its end. What the block switched on
would stay: a mode, through which every later operation of the process passes and is refused; a
level of vmap; gradients or the garbage collector off.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _autograd, _functorch


@contextmanager
def switched_back() -> Iterator[None]:
    """Restore modes, transforms, gradients and garbage collection if the block is interrupted.

    If one of them was left on, the cause is raised again: the Ctrl-C, not the error that the first
    operation under the forgotten mode ended in.

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
    try:
        yield
    except BaseException as error:
        left = torch._C._len_torch_function_stack() > modes
        while torch._C._len_torch_function_stack() > modes:
            torch._C._pop_torch_function_stack()
        if _functorch.get_dynamic_layer_stack_depth() > level:
            left = True
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(level)
        torch.set_grad_enabled(recording)
        if collecting:
            gc.enable()
        if no_hooks is None:
            _autograd._saved_tensors_hooks_enable()
        if left and (interrupt := _interrupt_in(error)) is not None:
            raise interrupt from None
        raise


def _interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that an error goes back to, or None."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__context__
    return None
