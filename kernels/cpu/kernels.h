// What every kernel source includes.
#pragma once

#include "simd.h"

#include "layout.h"
#include "parallel.h"

// All other symbols stay inside their library: several of them, one per instruction set, may share a process.
#define EXPORTED extern "C" __attribute__((visibility("default")))
