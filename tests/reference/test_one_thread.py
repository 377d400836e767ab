"""The NumPy backend takes one BLAS thread: its products are of one row each."""

from threadpoolctl import threadpool_info, threadpool_limits

from ddtree.ops import get_ops


def test_the_backend_takes_one_blas_thread():
    threadpool_limits(2, user_api="blas")
    get_ops("numpy")
    threads = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    assert all(count == 1 for count in threads)
