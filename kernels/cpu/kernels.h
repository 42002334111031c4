// What every kernel source includes.
#pragma once

#include "simd.h"

#include "layout.h"
#include "parallel.h"
#include "exports.h"
