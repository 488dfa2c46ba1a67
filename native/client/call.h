// What one call of a client works with, from its begin to its end: whatever daemon comes meanwhile,
// it goes on with the files of the one that it began with. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "client/daemon_link.h"
#include "client/prompt.h"
#include "client/regions.h"
#include "client/view.h"

namespace kvw {

inline uint64_t now_ns() { return system_clock().boot_ns(); }

struct ClientCall {
  // Binds the prompt. Throws Error usage "namespace_unknown", storage "memory_lost" where the
  // control page was cut, and as DaemonLink::renew does.
  static ClientCall open(DaemonLink& link, const Key& namespace_id, Prompt& prompt, bool patient,
                         uint64_t deadline_ns);
  // Throw Error usage "bad_shard", "bad_page_bytes".
  void check_shard(uint32_t shard) const;
  void check_pages(const Regions& regions, uint32_t shard) const;

  const View& view() const { return *daemon->view; }
  ClientSession& session() const { return *daemon->session; }
  const NamespaceShape& shape() const { return row.shape; }
  bool late() const { return now_ns() >= deadline_ns; }

  // The index's entry of a page, unless it was cleared, or stored after a clear that came during
  // the call: the pages of one call are of one side of it.
  std::optional<EntryView> find(size_t page) const {
    auto entry = view().index().find(prompt.key(page));
    if (entry && (entry->space != row.ordinal || entry->clear_epoch < clear_epoch ||
                  came_after_clear(*entry)))
      entry.reset();
    return entry;
  }
  // Whether the namespace was cleared since the call began, or nobody can tell any more.
  bool cleared() const {
    return view().clear_epoch(row.ordinal) > clear_epoch || view().control_lost();
  }
  // Whether a page may have been stored after such a clear. Clears of other namespaces raise the
  // epoch of new pages as well, so the control page is asked: once an epoch, since the next clear
  // has a higher one.
  bool came_after_clear(const EntryView& entry) const {
    if (entry.clear_epoch <= known_epoch) return false;
    if (cleared()) return true;
    known_epoch = entry.clear_epoch;
    return false;
  }
  // Whether the page before the first one of a run is stored, or there is none. True of any other
  // page: what lies before it is asked for as well.
  bool follows_stored(size_t page) const;
  // What a page of the prompt must be.
  Expected expected(size_t page) const {
    Prompt& of = prompt;
    return {row.shape.id,      of.key(page),      of.parent(page),
            of.position(page), of.witness_kind(), of.witness(page)};
  }
  // Tells the daemon, and does not wait for what it finds.
  void report_mismatch(const EntryView& entry, uint32_t shard) const;

  DaemonLink& link;
  std::shared_ptr<Attachment> daemon;
  Prompt& prompt;
  View::SpaceRow row;
  uint64_t clear_epoch;  // when it began
  uint64_t deadline_ns;
  // The highest epoch whose pages are known to be of before any clear that came during the call.
  mutable uint64_t known_epoch = clear_epoch;
};

}  // namespace kvw
