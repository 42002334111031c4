// Experts whose weights are in a mapped file. The system is asked for all pages of a step before they are read, so that
// it reads some while others are multiplied. Nothing here changes a result.
#pragma once

#include <sys/mman.h>

#include "../exports.h"

namespace mapped {

// Indices of MappedExperts.counts.
enum { kRead = 0, kKept = 1, kGuessed = 2, kRight = 3 };

// Asks the system to read an expert's pages, without waiting for them.
inline void ask(const MappedExperts& mapped, int place) {
  for (int64_t i = mapped.starts[place]; i < mapped.starts[place + 1]; ++i)
    madvise(mapped.pieces[i].begin, mapped.pieces[i].bytes, MADV_WILLNEED);
}

// Values of MappedExperts.guessed.
enum { kNotGuessed = 0, kOnlyGuessed = 1, kAskedFor = 2 };

// Requests the expert at this place, which the step will read.
inline void read(const MappedExperts& mapped, int place) {
  ++mapped.uses[place];
  ++mapped.counts[kRead];
  if (mapped.guessed[place]) ++mapped.counts[kRight];
  if (mapped.kept[place])
    ++mapped.counts[kKept];
  else if (mapped.guessed[place] != kAskedFor)
    ask(mapped, place);
}

// True if at least three of four guesses were right, of at least 64. Wrong guesses make the disk, which is the limit,
// read what nobody needs (docs/internals/lab-notes/cpu.md has the cost).
inline bool trusted(const MappedExperts& mapped) {
  return mapped.counts[kGuessed] >= 64 && 4 * mapped.counts[kRight] >= 3 * mapped.counts[kGuessed];
}

// Notes that the next layer may read the expert at this place, and requests it if guesses are mostly right.
inline void guess(const MappedExperts& mapped, int place) {
  if (mapped.guessed[place]) return;
  const bool asks = trusted(mapped) && !mapped.kept[place];
  mapped.guessed[place] = asks ? kAskedFor : kOnlyGuessed;
  ++mapped.counts[kGuessed];
  if (asks) ask(mapped, place);
}

}  // namespace mapped
