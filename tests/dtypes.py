"""The named formats that numpy and ml_dtypes have as dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {
    "binary16": np.float16,
    "binary32": np.float32,
    "binary64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3": ml_dtypes.float8_e4m3,
    "e3m4": ml_dtypes.float8_e3m4,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
SHORT = {name: dtype for name, dtype in DTYPES.items() if np.dtype(dtype).itemsize <= 2}
ML_DTYPES = {name: dtype for name, dtype in SHORT.items() if dtype is not np.float16}
