// From the run's last page up by parents: each is pinned where it lies, and all that are held by
// one fence are copied and digested into one buffer. It is no use of the pages: nothing is touched,
// and nothing promoted.
#include "client/pack_run.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/sequence_point.h"
#include "client/call.h"
#include "client/client.h"
#include "client/object_memory.h"
#include "client/pins.h"

namespace kvw {

namespace {

using remote::ObjectFault;

struct RunPage {
  EntryView entry;
  View::Whole whole;
};

class RunPacking {
 public:
  RunPacking(DaemonLink& link, ObjectMemory& memory, const remote::RunToPut& run, const Key& fleet)
      : link_(link), daemon_(link.attachment()), memory_(memory), run_(run), fleet_(fleet) {}

  PackedRun run() {
    const auto row = view().space(run_.namespace_id);
    if (!row) return {"unknown_namespace", {}};
    ordinal_ = row->ordinal;
    shape_ = row->shape;
    if (run_.pages != remote::object_pages(shape_)) return {fault_name(ObjectFault::shape), {}};
    pins_.emplace(view(), session(), shape_.slot_bytes());
    Key key = run_.key;
    for (uint32_t page = 0; page < run_.pages; ++page) {
      if (const char* why = take(key); why != nullptr) return {why, {}};
      key = pages_.back().whole.facts.parent;
    }
    if (!held()) return {"not_in_dram", {}};
    std::ranges::reverse(pages_);
    PackedRun packed = pack();
    KVW_SEQUENCE_POINT("pack: packed");
    const auto older = [epoch = view().clear_epoch(ordinal_)](const RunPage& page) {
      return page.entry.clear_epoch < epoch;
    };
    if (std::ranges::any_of(pages_, older)) return {"cleared", {}};
    return packed;
  }

 private:
  const View& view() const { return *daemon_->view; }
  ClientSession& session() const { return *daemon_->session; }

  // Null: the page's pin is stored, and it is among the pages.
  const char* take(const Key& key) {
    const auto entry = view().index().find(key);
    if (!entry || entry->space != ordinal_ || !entry->in_dram()) return "not_in_dram";
    KVW_SEQUENCE_POINT("pack: entry found");
    if (!pins_->add(*entry)) return "pin_budget";
    KVW_SEQUENCE_POINT("pack: pin stored");
    if (entry->clear_epoch < view().clear_epoch(ordinal_)) return "cleared";
    auto whole = view().find_whole(*entry, shape_);
    if (!whole || whole->facts.key != key) return held() ? damaged(*entry) : "not_in_dram";
    pages_.push_back({*entry, std::move(*whole)});
    return nullptr;
  }

  // Until then a slot may be another page's, and so what was read in it.
  bool held() {
    const size_t stored = pins_->size();
    return pins_->hold() == stored;
  }

  PackedRun pack() {
    const remote::ObjectSpec spec{fleet_,
                                  Secret(view().control().secret, kSecretBytes),
                                  shape_,
                                  pages_.back().whole.facts.witness_kind,
                                  run_.epoch,
                                  run_.key,
                                  run_.first_position,
                                  run_.pages};
    std::vector<remote::ObjectPage> pages;
    pages.reserve(pages_.size());
    for (const RunPage& page : pages_) pages.push_back({page.whole.facts, page.whole.payload});
    std::shared_ptr<nvme::AlignedBuffer> object = memory_.lend(spec.bytes());
    const remote::ObjectPacked packed = pack_object(spec, pages, object->span());
    if (packed.fault == ObjectFault::digest) return {damaged(pages_[packed.page].entry), {}};
    if (packed.fault != ObjectFault::none) return {fault_name(packed.fault), {}};
    return {"", std::move(object)};
  }

  // The daemon looks at the whole page by itself.
  const char* damaged(const EntryView& entry) {
    session().count(Counter::load_mismatch);
    Writer message(MessageType::report);
    message.put(Report{entry.key, view().slots().load(entry.slot).generation, entry.slot, 0});
    link_.tell(message, now_ns() + link_.options().timeout_ns);
    return "damaged";
  }

  DaemonLink& link_;
  std::shared_ptr<Attachment> daemon_;
  ObjectMemory& memory_;
  const remote::RunToPut& run_;
  const Key fleet_;
  uint16_t ordinal_ = 0;
  NamespaceShape shape_;
  std::optional<PinBatch> pins_;
  std::vector<RunPage> pages_;  // from the last one up, and then in their order
};

}  // namespace

PackedRun Client::pack_run(const remote::RunToPut& run, const Key& fleet) {
  link_.renew(false, now_ns() + link_.options().timeout_ns);
  return RunPacking(link_, *objects_, run, fleet).run();
}

}  // namespace kvw
