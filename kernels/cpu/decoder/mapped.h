// Experts whose weights lie in a mapped file: the system is asked for their pages before they are read, all of a step's
// at once, so that reading them goes on while others are multiplied. Nothing here changes a result.
#pragma once

#include <sys/mman.h>

#include "../exports.h"

namespace mapped {

// Of MappedExperts.counts.
enum { kRead = 0, kKept = 1, kGuessed = 2, kRight = 3 };

// Asks the system to read an expert's pages, without waiting for them.
inline void ask(const MappedExperts& mapped, int place) {
  for (int64_t i = mapped.starts[place]; i < mapped.starts[place + 1]; ++i)
    madvise(mapped.pieces[i].begin, mapped.pieces[i].bytes, MADV_WILLNEED);
}

// Asks for the expert at this place, which the step will read.
inline void read(const MappedExperts& mapped, int place) {
  ++mapped.uses[place];
  ++mapped.counts[kRead];
  if (mapped.guessed[place]) ++mapped.counts[kRight];
  if (mapped.kept[place])
    ++mapped.counts[kKept];
  else if (!mapped.guessed[place])
    ask(mapped, place);
}

// Asks for the expert at this place, which the next layer may read.
inline void guess(const MappedExperts& mapped, int place) {
  if (mapped.guessed[place]) return;
  mapped.guessed[place] = 1;
  ++mapped.counts[kGuessed];
  if (!mapped.kept[place]) ask(mapped, place);
}

}  // namespace mapped
