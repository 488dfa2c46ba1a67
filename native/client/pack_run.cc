// From the run's last page up by parents: each is pinned where it lies, and all are copied and
// digested into one buffer. It is no use of the pages: nothing is touched, and nothing promoted.
#include "client/pack_run.h"

#include <algorithm>
#include <utility>

#include "base/atomics.h"
#include "base/sequence_point.h"
#include "client/call.h"
#include "client/client.h"

namespace kvw {

namespace {

using remote::ObjectFault;

struct RunPage {
  EntryView entry;
  View::Whole whole;
};

class RunPacking {
 public:
  RunPacking(DaemonLink& link, const remote::RunToPut& run, const Key& fleet)
      : link_(link), daemon_(link.attachment()), run_(run), fleet_(fleet) {}
  ~RunPacking() {
    for (const int place : places_) session().drop_pin(place);
    session().pinned_bytes().give_back(places_.size() * shape_.slot_bytes());
  }
  RunPacking(const RunPacking&) = delete;
  RunPacking& operator=(const RunPacking&) = delete;

  PackedRun run() {
    const auto row = view().space(run_.namespace_id);
    if (!row) return {"unknown_namespace", {}};
    ordinal_ = row->ordinal;
    shape_ = row->shape;
    if (run_.pages != remote::object_pages(shape_)) return {fault_name(ObjectFault::shape), {}};
    Key key = run_.key;
    for (uint32_t page = 0; page < run_.pages; ++page) {
      if (const char* why = take(key); why != nullptr) return {why, {}};
      key = pages_.back().whole.facts.parent;
    }
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

  // Null: the page is pinned, and among the pages.
  const char* take(const Key& key) {
    const auto entry = view().index().find(key);
    if (!entry || entry->space != ordinal_ || !entry->in_dram()) return "not_in_dram";
    KVW_SEQUENCE_POINT("pack: entry found");
    if (!pin(*entry)) return "pin_budget";
    KVW_SEQUENCE_POINT("pack: pinned");
    if (entry->clear_epoch < view().clear_epoch(ordinal_)) return "cleared";
    if (session().lost() || !view().slot_in_range(entry->slot) ||
        !view().is_live(entry->slot, entry->generation))
      return "not_in_dram";
    auto whole = view().find_whole(*entry, shape_);
    if (!whole || whole->facts.key != key) return damaged(*entry);
    pages_.push_back({*entry, std::move(*whole)});
    return nullptr;
  }

  // The fence stands between the pin's store and the look at the slot's word (session_file.h).
  bool pin(const EntryView& entry) {
    const uint64_t limit_bytes = view().control().pin_limit_bytes.value.load();
    if (!session().pinned_bytes().take(shape_.slot_bytes(), limit_bytes)) return false;
    const int place = session().take_pin();
    if (place < 0) {
      session().pinned_bytes().give_back(shape_.slot_bytes());
      return false;
    }
    places_.push_back(place);
    session().store_pin(place, slot_pin(entry.slot, entry.generation));
    full_fence();
    return true;
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
    nvme::AlignedBuffer object(spec.bytes());
    const remote::ObjectPacked packed = pack_object(spec, pages, object.span());
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
  const remote::RunToPut& run_;
  const Key fleet_;
  uint16_t ordinal_ = 0;
  NamespaceShape shape_;
  std::vector<int> places_;     // of pins, each with a slot's share of bytes
  std::vector<RunPage> pages_;  // from the last one up, and then in their order
};

}  // namespace

PackedRun Client::pack_run(const remote::RunToPut& run, const Key& fleet) {
  link_.renew(false, now_ns() + link_.options().timeout_ns);
  return RunPacking(link_, run, fleet).run();
}

}  // namespace kvw
