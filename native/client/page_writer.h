// How the pages of a store get into their slots: copied by this processor, or by a GPU out of its
// own memory. Belongs to one call.
#pragma once

#include <memory>
#include <vector>

#include "client/call.h"
#include "client/gpus.h"

namespace kvw {

class PageWriter {
 public:
  virtual ~PageWriter() = default;
  // Begins to copy page `number` of the regions to `to`; `seal` lacks the digest alone. May throw.
  virtual void put(size_t number, std::byte* to, const Key& key, const Seal& seal) = 0;
  // After the last page of a window: the copies of it are all under way, or ended, and those of the
  // windows before are ended. May throw.
  virtual void start() = 0;
  // Ends the copies of all that was put. May throw.
  virtual void finish() = 0;
  // Of what is copied, and not taken out of here yet, in the order it was put.
  std::vector<Seal>& seals() { return seals_; }
  // False: something may still write to slots that were put. Never throws.
  virtual bool settle() { return true; }

 protected:
  std::vector<Seal> seals_;
};

// Nothing: the device has no mover for this call, or the engine's event did not come, until the
// deadline.
std::unique_ptr<PageWriter> page_writer(const ClientCall& call, Gpus& gpus, const Regions& regions);

}  // namespace kvw
