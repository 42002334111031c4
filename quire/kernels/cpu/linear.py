from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.backend import LinearContext
from quire.kernels.cpu import native_library


class CompiledLinearBase:
    """A subclass must keep alive the memory that `native` points to."""

    def __init__(
        self, library: native_library.NativeLibrary, linear: native_library.PackedLinear, dtype: torch.dtype
    ) -> None:
        """`dtype` is the type of x. The result has it too, or is float32 if `linear.wide`."""
        self.native = linear
        self.out_features, self.in_features = linear.outs, linear.in_
        self.dtype = dtype
        self._out_dtype = torch.float32 if linear.wide else dtype
        self._kernel = library.linear[dtype]
        self._pointer = ctypes.addressof(linear)

    def pointer_addresses_and_weights(self, struct: native_library.PackedLinear) -> list[tuple[int, Tensor]]:
        """Return the packed weights, each with the address of the kernel's pointer to them. `struct` is `native` or the
        kernel's copy of it.
        """
        raise NotImplementedError

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        rows, inner = x.shape
        if x.dtype != self.dtype or inner != self.in_features:
            raise TypeError(
                f"a linear of {self.dtype} from {self.in_features} to {self.out_features} "
                f"cannot take {list(x.shape)} of {x.dtype}"
            )
        x = x.contiguous()
        out = x.new_empty((rows, self.out_features), dtype=self._out_dtype)
        self._kernel(self._pointer, x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads(), None)
        return out


class PackedLinear(CompiledLinearBase):
    """A linear whose weights are not quantized. They have the dtype of x."""

    def __init__(
        self, library: native_library.NativeLibrary, weight: Tensor, bias: Tensor | None, *, wide: bool
    ) -> None:
        outs, inner = weight.shape
        dtype = weight.dtype
        self._bias = None if bias is None else bias.to(dtype).contiguous()
        weight = weight.contiguous()
        packed = weight.new_empty((outs + 63) // 64 * 64 * inner)
        shape, threads = (inner, outs), torch.get_num_threads()
        library.pack_linear[dtype](weight.data_ptr(), packed.data_ptr(), *shape, threads)
        compressed = library.compressed_size(packed.data_ptr(), *shape, threads) if dtype == torch.bfloat16 else 0
        self._weight = library.weight_arena.allocate_bytes(compressed or packed.nbytes)
        if compressed:
            library.compress(packed.data_ptr(), self._weight.data_ptr(), *shape, threads)
        else:
            self._weight.view(dtype).copy_(packed)
        bias_ptr = None if self._bias is None else self._bias.data_ptr()
        linear = native_library.PackedLinear(
            self._weight.data_ptr(), bias_ptr, *shape, compressed > 0, wide, None, None
        )
        super().__init__(library, linear, dtype)

    def pointer_addresses_and_weights(self, struct: native_library.PackedLinear) -> list[tuple[int, Tensor]]:
        return [(ctypes.addressof(struct) + native_library.PackedLinear.weight.offset, self._weight)]
