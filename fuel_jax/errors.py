"""Every error fuel_jax raises on purpose.

A message says, in this order: which op, which argument, what arrived, what was wanted, what to do
about it.  Nothing is raised from inside a kernel: all checks happen when a call is traced.
"""


class FuelError(Exception):
    """Base of every deliberate fuel_jax error."""


class ArgumentError(FuelError, ValueError):
    """The arguments of a call contradict each other or the op."""


class SignatureError(ArgumentError, TypeError):
    """An argument is missing, left over or of the wrong kind."""


class ShapeError(ArgumentError):
    """An operand's shape or dtype does not fit the op's signature."""


class X64Required(ArgumentError):
    """A 64-bit dtype was asked for while ``jax_enable_x64`` is off."""


class UnknownName(ArgumentError, KeyError):
    """No op, kernel or dtype has this name."""

    def __str__(self) -> str:
        """The message as it is: KeyError would show it quoted."""
        return Exception.__str__(self)


class FileError(FuelError, ValueError):
    """A file is not what its format says, or says of itself what cannot be."""


class UnsupportedKernel(FuelError, NotImplementedError):
    """A kernel was asked for by name and cannot serve these arguments."""


class NotDifferentiable(FuelError, NotImplementedError):
    """A gradient was asked of an op, or for an operand, that has none."""
