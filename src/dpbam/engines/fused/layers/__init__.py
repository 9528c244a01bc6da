"""One file per kind of layer: its rule, its maths and its kernel.

Importing the package imports every file of it, which registers their rules: a new file needs no
entry elsewhere.
"""

from importlib import import_module
from pkgutil import iter_modules

for _layer in iter_modules(__path__, f"{__name__}."):
    import_module(_layer.name)
