// How ranks hand each other what they have computed: see collective.cpp.
#pragma once

#include "../kernels.h"

// A rank's buffer in this step, of group.capacity bytes.
char* rank_buffer(const Collective& group, int rank);

// Says that this rank's buffer is filled, and waits for those of all others: after `looks` at their counts it sleeps.
// False if a rank has ended. Who fills a buffer has raised group.steps before.
bool exchange(Collective& group, int looks);
