"""Two C functions for a handful of rows, built with the user's own compiler: a few rows should cost one pass over the weights.

BLAS multiplies one row by a matrix-vector product and two or more by a routine made for hundreds, which costs as much as
five; a verification of 2..8 tokens falls exactly between.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# 2 x 6 accumulators and what feeds them fill the 16 vector registers of AVX2. Each output is summed in one order whatever
# `n` is, so the logits of a token do not depend on how many tokens were fed beside it. The weights are the module's own:
# nothing is packed, so nothing can be stale. The prefetch is the next two rows: they lie too far for the hardware's to see.
SOURCE = r"""
typedef long long i64;
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
static inline __attribute__((always_inline)) void tile(const int R, const int C, const float *x, const float *w,
                                                       const float *b, float *y, i64 in, i64 out) {
    vec acc[2][6];
    i64 k = 0;
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) acc[r][c] = (vec){0};
    for (; k + LANES <= in; k += LANES) {
        for (int r = 0; r < R; r++) {
            vec row = *(const vec *)(w + r * in + k);
            __builtin_prefetch(w + (r + R) * in + k, 0, 3);
            for (int c = 0; c < C; c++) acc[r][c] += row * *(const vec *)(x + c * in + k);
        }
    }
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) {
        float s = 0;
        for (int l = 0; l < LANES; l++) s += acc[r][c][l];
        for (i64 t = k; t < in; t++) s = __builtin_fmaf(w[r * in + t], x[c * in + t], s);
        y[c * out + r] = b ? s + b[r] : s;
    }
}
static inline __attribute__((always_inline)) void rows(const int R, const float *x, const float *w, const float *b,
                                                       float *y, i64 n, i64 in, i64 out) {
    for (; n >= 6; n -= 6, x += 6 * in, y += 6 * out) tile(R, 6, x, w, b, y, in, out);
    if (n == 5) tile(R, 5, x, w, b, y, in, out);
    if (n == 4) tile(R, 4, x, w, b, y, in, out);
    if (n == 3) tile(R, 3, x, w, b, y, in, out);
    if (n == 2) tile(R, 2, x, w, b, y, in, out);
    if (n == 1) tile(R, 1, x, w, b, y, in, out);
}
void linear(const float *x, const float *w, const float *b, float *y, i64 n, i64 in, i64 out, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (i64 part = 0; part < threads; part++) {
        i64 o = out / 2 * part / threads * 2, end = part + 1 == threads ? out : out / 2 * (part + 1) / threads * 2;
        for (; o < end; o += 2) { /* an odd last row goes with the row before it again, never alone: one order of summing */
            i64 at = o + 2 <= end ? o : o - 1;
            rows(2, x, w + at * in, b ? b + at : 0, y + at, n, in, out);
        }
    }
}
void rms_norm(const float *x, const float *w, float *y, i64 n, i64 size, float eps) {
    for (; n; n--, x += size, y += size) {
        float part[16] = {0}, sum = 0;
        i64 k = 0;
        for (; k + 16 <= size; k += 16) for (int l = 0; l < 16; l++) part[l] += x[k + l] * x[k + l];
        for (int l = 0; l < 16; l++) sum += part[l];
        for (; k < size; k++) sum += x[k] * x[k];
        float scale = 1.0f / __builtin_sqrtf(sum / size + eps);
        for (k = 0; k < size; k++) y[k] = w[k] * (x[k] * scale);
    }
}
"""


class Kernels(NamedTuple):
    """The functions, and the compiler's words where there are none."""

    library: ctypes.CDLL | None
    why_not: str = ""


@functools.cache
def kernels() -> Kernels:
    """Build (about a second, once a process, kept nowhere) and check against torch; without a compiler, say so."""
    compiler = os.environ.get("CC") or next((one for one in ("cc", "gcc", "clang") if shutil.which(one)), None)
    if compiler is None:
        return Kernels(None, "no C compiler found (looked for $CC, cc, gcc, clang)")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            return _built(shlex.split(compiler), Path(place))
    except OSError as error:  # no room, no folder for temporary files
        return Kernels(None, f"the kernels could not be built: {error}")


def _built(compiler: list[str], place: Path) -> Kernels:
    (place / "k.c").write_text(SOURCE)
    said = ""
    # torch's own OpenMP, where it brings one: a second would keep a second set of threads spinning on the same cores.
    ours = [str(one) for one in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")][:1] or ["-lgomp"]
    for flags, libraries in ((["-march=native", "-fopenmp"], ours), (["-march=native"], []), ([], [])):
        try:
            for step in (["-c", *flags, "k.c", "-o", "k.o"], ["-shared", "k.o", "-o", "k.so", *libraries]):
                command = [*compiler, "-O3", "-fPIC", *step]
                subprocess.run(command, cwd=place, capture_output=True, text=True, errors="replace", check=True, timeout=60)
            library = ctypes.CDLL(str(place / "k.so"))
            library.linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_longlong] * 4
            library.rms_norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_longlong] * 2 + [ctypes.c_float]
            library.linear.restype = library.rms_norm.restype = None
        except subprocess.TimeoutExpired:  # noqa: PERF203 (three tries)
            return Kernels(None, f"{compiler[0]} took more than a minute")
        except (subprocess.CalledProcessError, OSError, AttributeError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()[-300:]
        else:
            return Kernels(library) if _right(library) else Kernels(None, f"{compiler[0]} built kernels that compute wrongly")
    return Kernels(None, f"{compiler[0]} cannot build the kernels: {said}")


def linear(library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] or None, all fp32 on the CPU, `weight` contiguous, out >= 2 -> [..., out]."""
    x = x.contiguous()
    out, width = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    offset = None if bias is None else bias.data_ptr()
    rows = x.numel() // width
    library.linear(x.data_ptr(), weight.data_ptr(), offset, y.data_ptr(), rows, width, out, torch.get_num_threads())
    return y


def rms_norm(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size], fp32 on the CPU -> weight * x / sqrt(mean(x^2) + eps)."""
    x = x.contiguous()
    y = torch.empty_like(x)
    library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // len(weight), len(weight), eps)
    return y


@torch.no_grad()
def _right(library: ctypes.CDLL) -> bool:
    """Does it agree with torch, sizes that fill no vector included?"""
    noise = torch.Generator().manual_seed(0)
    for n, width, out in ((1, 64, 8), (7, 77, 5), (13, 8, 3)):
        x, weight, bias = (torch.randn(*shape, generator=noise) for shape in ((n, width), (out, width), (out,)))
        if not torch.allclose(linear(library, x, weight, bias), torch.nn.functional.linear(x, weight, bias), atol=1e-4):
            return False
        wanted = weight[0] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        if not torch.allclose(rms_norm(library, x, weight[0].contiguous(), 1e-5), wanted, atol=1e-4):
            return False
    return True
