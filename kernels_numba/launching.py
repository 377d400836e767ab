"""Kernels that want more shared memory than a plain launch may have: once allowed it, they are launched as any other.

Numba compiles for the very GPU that is there, sm_90a on compute capability 9.0, and launches with cuda.core: a kernel
may use wgmma, and its launches are captured and overlap as all launches do. Only the limit must be raised.
"""

import functools

from numba import cuda


@functools.cache
def _allow(spec, shared_bytes, device_id):
    from numba.cuda.cudadrv.driver import binding, driver

    kernel = spec.kernel.compile(spec.signature)
    function = kernel._codelibrary.get_cufunc()
    limit = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuKernelSetAttribute(limit, shared_bytes, function.handle, device_id)


def allow_shared(spec, shared_bytes):
    """Let the kernel of a KernelSpec be launched with up to that many bytes of dynamic shared memory.

    Compiles it for the current device where that has not been done; later calls cost a look-up. A launch whose
    arguments have other types than the spec's is another kernel, without this leave.
    """
    _allow(spec, shared_bytes, cuda.get_current_device().id)
