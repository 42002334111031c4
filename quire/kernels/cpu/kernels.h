// The headers that every kernel source needs, in the order in which they depend on each other.
#pragma once

#include "simd.h"

#include "exports.h"
#include "layout.h"
#include "parallel.h"

#include "kv_codes.h"
