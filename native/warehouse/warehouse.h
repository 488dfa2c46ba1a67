// The warehouse: one state machine over arena, index, sessions and NVMe log. Deterministic: it has
// no thread and no socket of its own, time comes from the clock it is given, and every method runs
// on the core thread. server/ feeds it messages, bindings/ commands.
//
// It is made of parts that own their members and share WarehouseState: reservations.h (stores),
// write_admission.h and promotions.h (NVMe, both ways), removal.h (how pages leave), eviction.h and
// index_room.h (room for others), uses.h, quarantine.h. clear.cc has clears and orphans, recover.cc
// what an earlier daemon left, warehouse.cc namespaces, ticks and status. operator_eviction.h is an
// operator's evict, in steps. check.h verifies what is stored; feeds.h tells of it; hbm.h has
// copies of it in the memory of a device; keeps.h what stays; puts.h has what a remote store shall
// get of it, fetches.h what is brought from there. why.cc says why a page is not there.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "warehouse/check.h"
#include "warehouse/eviction.h"
#include "warehouse/feeds.h"
#include "warehouse/index_room.h"
#include "warehouse/operator_eviction.h"
#include "warehouse/promotions.h"
#include "warehouse/quarantine.h"
#include "warehouse/removal.h"
#include "warehouse/reservations.h"
#include "warehouse/state.h"
#include "warehouse/uses.h"
#include "warehouse/why.h"
#include "warehouse/write_admission.h"

namespace kvw {

class Warehouse final : public nvme::LogHost {
 public:
  Warehouse(WarehouseOptions options, const Clock& clock);
  ~Warehouse() override;

  // Declares a namespace and returns its ordinal: `wish` where that is free (kMaxNamespaces: none),
  // or the one it has already. Throws Error: usage "page_too_large", "bad_namespace"; capacity
  // "too_many_namespaces".
  uint32_t add_namespace(uint32_t wish, const NamespaceShape& shape, uint64_t clear_epoch);
  // Takes a namespace back that nothing uses: no page in any tier, no store under way, no watcher.
  // kMaxNamespaces: of all those the one that was used longest ago. Returns its id, or nothing.
  // From here on its clients are told that they have to open it again.
  std::optional<Key> forget_namespace(uint32_t ordinal);
  // Records of `key` up to a log position are dead (operator's evict). Before recover().
  void add_tombstone(const Key& key, uint64_t position) { tombstones_[key] = position; }
  RecoverySummary recover();

  // --- sessions and stores
  Registry& sessions() { return state_.sessions; }
  // One engine step. Answers are in the order of the requests. Throws Error (usage
  // "namespace_unknown") before anything is done.
  void exchange(SessionId session, const ExchangeTarget& target, std::span<const Seal> seals,
                std::span<const ReserveRequest> reserves, std::vector<SealAnswer>& sealed,
                std::vector<ReserveAnswer>& reserved) {
    reservations_.exchange(session, target, seals, reserves, sealed, reserved);
  }
  // What the curve makes of an exchange, which takes a tenth as long as the exchange itself: for
  // when the answer is on its way. Else the next one, a tick or the curve's reader does it.
  void count_stores() { uses_.count_stores(); }
  void settle(SessionId session, std::span<const SlotRef> refs) {
    reservations_.settle(session, refs);
  }
  std::vector<SlotRef> unsettled(SessionId session) const {
    return state_.groups.unsettled(session);
  }

  // --- NVMe
  void promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers) {
    promotions_.promote(keys, answers);
  }
  bool has_log() const { return state_.log != nullptr; }
  uint64_t log_end() const;  // no record of now lies above this position; 0: no tier
  int log_fd() const { return state_.log->event_fd(); }
  // Where the segments are, and how many of them one session may hold at a time, so that reclaim
  // finds others. Precondition: has_log().
  std::string segments_directory() const { return state_.options.nvme_dir + "/segments"; }
  uint64_t segments_held_limit() const;
  void poll_log() {
    state_.log->poll();
    checker_.step();  // what waited for promotions to end
  }
  // Null: no HBM tier.
  HbmTier* hbm() { return state_.hbm.get(); }
  // Clients that wait for what has come, from wherever: once for all that came together.
  void wake_waiters() { state_.waiters.wake(); }
  // Null: nothing is written to a remote tier.
  Puts* puts() { return state_.puts.get(); }
  // Null: nothing is read from one.
  Fetches* fetches() { return state_.fetches.get(); }
  std::vector<FetchAnswer> fetch(SessionId session, const FetchSpace& space,
                                 std::span<const FetchRun> runs) {
    if (state_.fetches) return state_.fetches->ask(session, space, runs);
    return std::vector(runs.size(), FetchAnswer::off);
  }
  std::string presence_path() const { return state_.presence_path(); }
  // The namespace's objects in the store are of this epoch, as far as its clears here up to
  // `clear_epoch` go: they are read and written from now on, until the next clear. False: there is
  // no such namespace, it was cleared since, or the epoch is the one that nothing can follow.
  bool set_remote_epoch(const Key& namespace_id, uint64_t fleet_epoch, uint64_t clear_epoch);
  // They are not, until set_remote_epoch(). Nothing is done where there is no such namespace.
  void stop_remote(const Key& namespace_id);
  // See WriteAdmission.
  using Spill = WriteAdmission::Spill;
  bool spill(Spill& walk) { return writes_.spill(walk); }
  bool has_room_for_unwritten() { return writes_.has_room_for_unwritten(); }
  uint64_t request_flush() { return state_.log->request_flush(); }
  bool flushed(uint64_t ticket) const { return state_.log->durable_through() >= ticket; }
  FlushReport flush_report() const { return writes_.report(); }

  // --- leaving (clear.cc)
  // begin_clear() hides every page of the namespace that was reserved before `epoch` from readers
  // at once; clear_some() then takes them out, from index position `cursor` on, a bounded stretch
  // at a time, and in the end gives up what is being stored (cursor becomes kNoPage when that is
  // done). Returns how many it took out. clear() is both, whole.
  void begin_clear(uint32_t ordinal, uint64_t epoch);
  uint64_t clear_some(uint32_t ordinal, uint64_t epoch, PageId& cursor);
  uint64_t clear(uint32_t ordinal, uint64_t epoch);
  void raise_epoch(uint64_t epoch);
  // An operator's evict, of a namespace or of all (-1); throws Error as OperatorEviction does.
  OperatorEviction begin_eviction(int ordinal, uint64_t pages, std::string_view tiers);
  // The same, whole. Returns key and log position of what left NVMe, for tombstones.
  std::vector<Tombstone> evict(int ordinal, uint64_t pages, std::string_view tiers, uint64_t& left);
  uint64_t sweep(size_t limit);

  // --- what is not believed any more
  // A client saw bytes that are not the page's; see Checker.
  void report(SessionId session, const Report& report) { checker_.report(session, report); }
  // Key and log position of records that were quarantined, or left while reclaim moved them, since
  // the last call, for tombstones: a restart must not find them again. Bounded.
  std::vector<Tombstone> take_tombstones() { return quarantine_.take_tombstones(); }
  // Verifies pages in both tiers; see Checker.
  void check(const CheckRequest& request, Checker::End end) {
    checker_.begin(request, std::move(end));
  }

  // --- what stays
  Keeps& keeps() { return state_.keeps; }
  // Adds to a keep what is stored of `pages`, of each prompt up to its first page that is not, or
  // that is stored as another prompt's, or elsewhere in it.
  // is_broken: as the step before this one said. Throws Error usage "namespace_unknown".
  KeepStep keep(KeepId id, const Key& namespace_id, std::span<const PageOfRun> pages,
                bool is_broken);
  // Makes a keep that an earlier daemon had, up to the first of `marks` that is there; is_lone:
  // with each of them. Refused, there is none.
  KeepRefusal restore_keep(KeepId id, KeepTime time, std::span<const Key> marks, bool is_lone);

  // What enters and leaves the tiers, for those who watch.
  Feeds& feeds() { return feeds_; }

  void tick();
  // What was begun and has a step more to do, once others were served: a check, a tick, a slab's
  // way to another page size.
  bool goes_on() const {
    return checker_.goes_on() || removal_.goes_on() || eviction_.goes_on() ||
           state_.keeps.goes_on();
  }
  void go_on();
  void drain();
  void undrain();
  bool draining() const { return reservations_.draining(); }
  void stop();

  // --- growth: slabs are allocated elsewhere, one after the other
  Arena& arena() { return state_.arena; }
  // Of the keys that it names pages by.
  Secret secret() const { return Secret(state_.options.secret.data(), kSecretBytes); }
  std::optional<uint32_t> next_slab_to_populate() const {
    return eviction_.next_slab_to_populate();
  }
  void slab_populated(uint32_t slab, int err) { eviction_.slab_populated(slab, err); }

  WarehouseStatus status();
  // What other sizes of the tiers would have hit, in a namespace (-1: in all).
  MissRatioReport miss_ratio(int ordinal) { return uses_.miss_ratio(ordinal); }
  // Those of a namespace (-1: of all), `limit` at most, of a bounded stretch of the index from
  // position `cursor` on (it becomes kNoPage at the end).
  std::vector<PageInfo> pages(int ordinal, PageId& cursor, size_t limit) const;
  static constexpr uint64_t kListedPerStep = 8192;
  // Of the pages of a prompt, by their keys, what is to be said of each (why.cc): as of the wall
  // time `as_of_ns`, as far as is known of a time a moment ago; 0: of now. Throws Error usage
  // "namespace_unknown".
  std::vector<PageWhy> why(const Key& namespace_id, std::span<const Key> keys,
                           uint64_t as_of_ns) const;
  // Adds to `branches` what is stored at `position` behind the page `parent`, beside a page of
  // `tokens` (none: of an engine's keys, which tell no tokens). Position 0, where there is no
  // parent: what begins at the index positions from `cursor` on, a bounded stretch of them (it
  // becomes kNoPage at the end). Throws likewise.
  void add_branches(const Key& namespace_id, const Key& parent, uint32_t position,
                    std::span<const uint32_t> tokens, uint64_t as_of_ns, Branches& branches) const;
  void add_first_pages(const Key& namespace_id, PageId& cursor, std::span<const uint32_t> tokens,
                       uint64_t as_of_ns, Branches& branches) const;
  std::vector<std::pair<std::string, std::string>> take_events() { return state_.events.take(); }

  // LogHost
  void on_written(uint64_t ticket, const nvme::Extent& extent) override {
    writes_.written(static_cast<SlotId>(ticket), extent);
  }
  void on_write_failed(uint64_t ticket, std::string_view reason) override {
    writes_.failed(static_cast<SlotId>(ticket), reason);
  }
  void on_read(uint64_t ticket, nvme::ReadResult result, PageFacts&& facts) override {
    promotions_.read(static_cast<SlotId>(ticket), result, std::move(facts));
  }
  nvme::RecordUse use_of(const Key& key, const nvme::Extent& extent) override;
  void forget(const Key& key, const nvme::Extent& extent, bool lost) override;
  void moved(const Key& key, const nvme::Extent& from, const nvme::Extent& to) override {
    quarantine_.moved(key, from, to);
  }
  void moving(const Key& key, const nvme::Extent& to) override { quarantine_.moving(key, to); }
  void set_segment_word(uint32_t segment, uint32_t life, bool closing) override;
  void read_pins() override;
  bool segment_pinned(uint32_t segment) override;
  void on_event(std::string_view name, std::string_view detail) override {
    state_.events.add(name, detail);
  }

 private:
  void open_log();
  void publish_row(uint32_t ordinal);
  void publish_remote(uint32_t ordinal, std::optional<uint64_t> epoch);
  void raise_clear_epoch(uint32_t ordinal, uint64_t epoch);
  bool in_use(uint32_t ordinal) const;
  uint16_t ordinal_to_ask(const Key& namespace_id) const;
  bool was_there(const EntryView& view, uint64_t as_of_ns) const;
  bool was_being_stored(const Key& key, uint64_t as_of_ns) const;
  std::optional<Absence> absence_of(const Key& key, uint64_t as_of_ns) const;
  void compare(const EntryView& view, std::span<const uint32_t> tokens, uint64_t as_of_ns,
               Branches& branches) const;
  void publish_rates();
  void publish_pin_limit();
  void look_at_files();

  WarehouseState state_;
  WriteAdmission writes_{state_};
  Removal removal_{state_, writes_};
  Uses uses_{state_};
  Eviction eviction_{state_, writes_, removal_, uses_};
  IndexRoom index_room_{state_, writes_, removal_, uses_, eviction_};
  Quarantine quarantine_{state_, writes_, removal_};
  Promotions promotions_{state_, eviction_, quarantine_};
  Reservations reservations_{state_,
                             {writes_, removal_, uses_, eviction_, index_room_, promotions_}};
  Checker checker_{state_, quarantine_, promotions_};
  Feeds feeds_{state_};

  std::unordered_map<Key, uint64_t, KeyHash> tombstones_;  // until recover()
  bool recovered_ = false;
  uint64_t ticks_ = 0;
  int files_lost_ = 0;  // 1: memory of them was lost; 2: one was cut
};

}  // namespace kvw
