"""Casts of the oracle: E8M0, E2M1, E4M3 and BF16 to and from float32, in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp4comm.formats import (
    BF16_NAN,
    E2M1_VALUES,
    E4M3,
    E4M3_MAX,
    E4M3_NAN,
    E8M0_NAN,
    F32_NAN,
)

Array = npt.NDArray[Any]


def _e4m3_magnitudes() -> Array:
    """Values of the E4M3 codes 0..0x7E, ascending, from the definition of the format."""
    values = []
    for code in range(E4M3_MAX + 1):
        exponent, mantissa = code >> E4M3.mantissa_bits, code & 7
        significand = mantissa / 8 if exponent == 0 else 1 + mantissa / 8  # exponent 0: subnormal
        values.append(significand * 2.0 ** (max(exponent, 1) - E4M3.bias))
    return np.array(values, np.float32)


E4M3_VALUES = _e4m3_magnitudes()


def canonical_nan(values: Array) -> Array:
    """Replace every NaN of a float32 array by the one that is written."""
    return np.where(np.isnan(values), np.uint32(F32_NAN).view(np.float32), values)


def e8m0_to_float32(scales: Array) -> Array:
    """Decode E8M0 bytes, any shape, to float32: 2^(byte - 127), NaN for 0xFF.

    >>> e8m0_to_float32(np.array([0, 127, 254], np.uint8))
    array([5.8774718e-39, 1.0000000e+00, 1.7014118e+38], dtype=float32)
    """
    bits = np.asarray(scales, np.uint32) << 23
    bits = np.where(bits == 0, 0x00400000, bits)  # 2^-127 is a float32 subnormal
    return np.where(bits == E8M0_NAN << 23, F32_NAN, bits).astype(np.uint32).view(np.float32)


def e2m1_to_float32(codes: Array) -> Array:
    """Decode E2M1 codes 0..15, any shape, to float32."""
    codes = np.asarray(codes, np.uint8)
    return np.where(codes & 8, -E2M1_VALUES[codes & 7], E2M1_VALUES[codes & 7])


def e4m3_to_float32(codes: Array) -> Array:
    """Decode E4M3FN codes, any shape, to float32; 0x7F and 0xFF give NaN."""
    codes = np.asarray(codes, np.uint8)
    magnitudes = np.append(E4M3_VALUES, np.uint32(F32_NAN).view(np.float32))[codes & 0x7F]
    return canonical_nan(np.where(codes & 0x80, -magnitudes, magnitudes))


def bf16_to_float32(bits: Array) -> Array:
    """Decode BF16 bit patterns, any shape, to float32; NaN payloads are kept."""
    return (np.asarray(bits, np.uint32) << 16).astype(np.uint32).view(np.float32)


def float32_to_bf16(values: Array) -> Array:
    """Round float32 to BF16 bits, ties to even; every NaN becomes 0x7FC0."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), BF16_NAN, rounded).astype(np.uint16)


def _nearest_magnitude(values: Array, magnitudes: Array) -> Array:
    """Index of the magnitude nearest to abs(value); ties to the even index, saturating."""
    distance = np.abs(np.asarray(values, np.float64))
    middles = (magnitudes[:-1].astype(np.float64) + magnitudes[1:]) / 2
    below = np.searchsorted(middles, distance, "left")
    above = np.searchsorted(middles, distance, "right")  # differs from `below` on a tie only
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


def float32_to_e2m1(values: Array) -> Array:
    """Round floats that are not NaN to E2M1 codes: ties to even, saturating at 6, -0 kept.

    >>> float32_to_e2m1(np.array([0.75, 2.5, 5.0, -0.0]))
    array([2, 4, 6, 8], dtype=uint8)
    """
    return _nearest_magnitude(values, E2M1_VALUES) | np.where(np.signbit(values), 8, 0).astype("u1")


def float32_to_e4m3(values: Array) -> Array:
    """Round floats to E4M3FN codes: ties to even, saturating at 448 (Inf too), NaN is 0x7F."""
    sign = np.where(np.signbit(values), 0x80, 0)
    codes = _nearest_magnitude(values, E4M3_VALUES) | sign
    return np.where(np.isnan(values), E4M3_NAN, codes).astype(np.uint8)
