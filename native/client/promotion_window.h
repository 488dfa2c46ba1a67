// Finding the pages of one load or pin in DRAM: those that are only on NVMe are asked for, window
// by window, so that the first are usable while the rest are read. Belongs to one call.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "client/client.h"

namespace kvw {

// How often a load looks a page up again that was reused, or damaged, while it was being read.
inline constexpr int kStaleTries = 4;

// What page `page` of the prompt must be.
inline Expected expected_page(const Key& namespace_id, Prompt& prompt, size_t page) {
  return {namespace_id,          prompt.key(page),      prompt.parent(page),
          prompt.position(page), prompt.witness_kind(), prompt.witness(page)};
}

class PromotionWindow {
 public:
  PromotionWindow(Client& client, const Client::Open& call, Prompt& prompt, uint64_t deadline_ns);

  // The entry of a page that is in DRAM now, promoting it if it must. Nothing: `why` says.
  std::optional<EntryView> in_dram(size_t page, size_t end, Reason& why);
  // Of a page that was reported: waits a moment for the daemon to take it out of DRAM, where
  // another copy is on NVMe.
  bool has_other_copy(const EntryView& damaged);

 private:
  std::atomic<uint64_t>& promoted_word() const;
  bool ask_ahead(size_t page, size_t end, Reason& why);
  Reason promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers);
  void wait(uint64_t tick);

  Client& client_;
  const Client::Open& call_;
  Prompt& prompt_;
  uint64_t deadline_ns_, epoch_, window_;
  size_t asked_until_ = 0;  // pages before it are in DRAM or on their way, as far as we were told
  size_t low_water_ = 0;    // so many of them left: ask for more
  bool ask_again_ = false;  // nothing has arrived for a while: what was asked for may be lost
};

}  // namespace kvw
