// How ranks exchange results: see collective.cpp.
#pragma once

#include "../kernels.h"

// A rank's buffer in this step, of group.capacity bytes.
char* rank_buffer(const Collective& group, int rank);

// Announces that this rank's buffer is filled, and waits for those of all others. After `looks` at their counts it
// sleeps. False if a rank has ended. The caller must have raised group.steps before filling its buffer.
bool exchange(Collective& group, int looks);
