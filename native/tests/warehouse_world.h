// A warehouse on a directory of its own in shared memory, a clock that moves when told, and peers:
// clients reduced to what the protocol asks of them, so that a test can stop between any two steps.
// Pages follow from a chain's number and a position; their bytes follow from key and shard.
//
// A Peer maps the files by descriptors of its own, as a client process does: what it holds outlives
// the Warehouse object. World::kill() drops that object without any orderly step; real SIGKILLs are
// in client_test.cc and warehouse_recover_test.cc.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "chain/chain.h"
#include "client/session.h"
#include "client/view.h"
#include "copy/copy.h"
#include "tests/check.h"
#include "warehouse/warehouse.h"

namespace kvw {

class TempDir {
 public:
  TempDir() : owner_(::getpid()) {
    const char* root = std::getenv("KVW_TEST_SHM");
    std::string name = std::string(root != nullptr ? root : "/dev/shm") + "/kvw-test-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw storage_error("cannot create " + name, errno);
    path_ = name;
  }
  ~TempDir() {
    if (::getpid() != owner_) return;  // a forked child must not remove its parent's files
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  pid_t owner_;
};

inline uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

inline std::vector<std::byte> test_secret() {
  std::vector<std::byte> secret(kSecretBytes);
  for (size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(mixed(i));
  return secret;
}

inline constexpr Key kWarehouse{0x77, 0x99};
inline constexpr Key kSpace{0x51, 0x52};
inline constexpr uint64_t kMiB = 1ull << 20;

inline NamespaceShape shape_of(uint64_t shard_bytes, uint32_t shards = 2, Key id = kSpace) {
  NamespaceShape shape;
  shape.id = id;
  shape.page_tokens = 16;
  shape.shards = shards;
  shape.shard_bytes = shard_bytes;
  return shape;
}

struct TestPage {
  Key key, parent;
  uint32_t position = 0;
  std::vector<uint32_t> tokens;

  std::span<const std::byte> witness() const { return std::as_bytes(std::span(tokens)); }
};

// The first `count` pages of prompt number `chain`.
inline std::vector<TestPage> pages_of(const NamespaceShape& shape, uint64_t chain, uint32_t count) {
  static const std::vector<std::byte> bytes = test_secret();
  const Secret secret(bytes.data(), kSecretBytes);
  std::vector<TestPage> pages(count);
  Key key = root_key(secret, shape.id);
  for (uint32_t at = 0; at < count; ++at) {
    TestPage& page = pages[at];
    page.parent = key;
    page.position = at;
    for (uint32_t i = 0; i < shape.page_tokens; ++i)
      page.tokens.push_back(static_cast<uint32_t>(mixed(chain << 32 | at << 8 | i)));
    page.key = key = chain_key(secret, page.parent, page.tokens);
  }
  return pages;
}

inline TestPage page_of(const NamespaceShape& shape, uint64_t chain, uint32_t position) {
  return pages_of(shape, chain, position + 1).back();
}

inline std::vector<std::byte> bytes_of(const Key& key, uint32_t shard, size_t bytes) {
  std::vector<std::byte> data(bytes);
  uint64_t state = key.lo ^ key.hi * 3 ^ shard;
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = mixed(state++);
    std::memcpy(data.data() + i, &word, std::min<size_t>(8, bytes - i));
  }
  return data;
}

inline ParentFd duplicate(int fd) {
  ParentFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) throw storage_error("cannot duplicate a descriptor", errno);
  return copy;
}

inline std::shared_ptr<const View> view_of(Arena& arena) {
  return std::make_shared<const View>(duplicate(arena.control_fd()), duplicate(arena.slots_fd()),
                                      duplicate(arena.index_fd()), duplicate(arena.arena_fd()),
                                      true);
}

class World {
 public:
  explicit World(NamespaceShape shape, uint64_t dram_bytes = 8 * kMiB) : shape_(shape) {
    options.arena_dir = directory.path() + "/arena";
    options.dram_bytes = dram_bytes;
    options.warehouse_id = kWarehouse;
    options.secret = test_secret();
  }

  // Opens or re-opens the directory; every slab is there before it returns.
  RecoverySummary start() {
    const RecoverySummary summary = start_without_slabs();
    while (const auto slab = warehouse_->next_slab_to_populate())
      warehouse_->slab_populated(*slab, warehouse_->arena().populate_slab(*slab));
    return summary;
  }
  RecoverySummary start_without_slabs() {
    warehouse_ = std::make_unique<Warehouse>(options, clock);
    for (const NamespaceShape& shape : declared)
      warehouse_->add_namespace(kMaxNamespaces, shape, 0);
    if (declare_own) warehouse_->add_namespace(kMaxNamespaces, shape_, clear_epoch);
    if (before_recover) before_recover();
    return warehouse_->recover();
  }
  void kill() { warehouse_.reset(); }
  RecoverySummary restart() {
    kill();
    return start();
  }
  void pass(uint64_t ns) {
    clock.advance_ns(ns);
    warehouse_->tick();
  }

  Warehouse& operator*() { return *warehouse_; }
  Warehouse* operator->() { return warehouse_.get(); }
  const NamespaceShape& shape() const { return shape_; }
  TestPage page(uint64_t chain, uint32_t position = 0) const {
    return page_of(shape_, chain, position);
  }

  const Slots& slots() { return warehouse_->arena().slots(); }
  SlotWord word(SlotId slot) { return slots().load(slot); }
  SlotMeta* meta(SlotId slot) { return slots().meta(slot, slots().layout(slots().slab_of(slot))); }
  void set_word(SlotId slot, SlotWord word) { slots().word(slot).store(word.pack()); }
  std::byte* payload(SlotId slot) {
    return warehouse_->arena().payload(slot, slots().layout(slots().slab_of(slot)));
  }
  std::optional<EntryView> entry(const TestPage& page) {
    return warehouse_->arena().index().find(page.key);
  }
  bool stored(const TestPage& page) { return entry(page).has_value(); }
  SlotId slot_of(const TestPage& page) {
    const auto found = entry(page);
    CHECK(found.has_value());
    return found->slot;
  }

  // Slots of the test's own page size when all slabs are cut for it.
  uint64_t capacity() {
    SlabLayout layout;
    layout.slot_blocks = static_cast<uint32_t>(shape_.slot_bytes() / kBlockBytes);
    layout.meta_units = static_cast<uint16_t>(meta_bytes_of(shape_) / 64);
    return warehouse_->arena().slab_count() * uint64_t{slots().slots_in(layout)};
  }
  uint64_t total_slots() {  // of the slabs that are cut, for whatever
    uint64_t total = 0;
    for (uint32_t slab = 0; slab < warehouse_->arena().slab_count(); ++slab)
      total += slots().slots_in(slots().layout(slab));
    return total;
  }
  // Every slot is free, holds a page, or is on its way between the two: none is forgotten.
  void check_no_slot_leaks() {
    const WarehouseStatus status = warehouse_->status();
    CHECK_EQ(status.free_slots + status.dram_pages + status.zombie_slots + status.reserved_slots +
                 status.limbo_slots,
             total_slots());
  }
  // As above when nothing is on its way any more.
  void check_settled() {
    const WarehouseStatus status = warehouse_->status();
    CHECK_EQ(status.reserved_slots + status.limbo_slots + status.zombie_slots, 0);
    CHECK_EQ(status.free_slots + status.dram_pages, total_slots());
  }

  TempDir directory;
  FakeClock clock;
  WarehouseOptions options;
  std::vector<NamespaceShape> declared;  // others, declared first at every start
  bool declare_own = true;
  uint64_t clear_epoch = 0;
  std::function<void()> before_recover;  // called at every start, with the files open and mapped

 private:
  NamespaceShape shape_;
  std::unique_ptr<Warehouse> warehouse_;
};

enum class Got {
  missing,
  stale,
  mismatch,
  right,
  wrong,  // accepted, and not the page's bytes: must never be seen
};

// The part of a client that the protocol rests on: a session, mappings, and each step by itself.
class Peer {
 public:
  // `pid`: 0 for a process that is not seen from here, so that the session counts alone.
  explicit Peer(World& world, uint64_t pid = 0) : world_(&world), shape_(world.shape()) {
    Registry::Created created = (*world_)->sessions().create(pid);
    lock_ = Fd(::fcntl(created.descriptor.get(), F_DUPFD_CLOEXEC, 0));
    session_ = std::make_unique<ClientSession>(ParentFd(created.descriptor.release()));
    map();
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  SessionId id() const { return session_->id(); }
  ClientSession& session() { return *session_; }
  const View& view() const { return *view_; }
  std::shared_ptr<const View> shared_view() const { return view_; }
  void map() { view_ = view_of((*world_)->arena()); }
  void use(const NamespaceShape& shape) { shape_ = shape; }

  ReserveAnswer reserve(const TestPage& page, uint32_t shard = 0) {
    return reserve_as(page, shard, page.witness());
  }
  // Of bytes that belong to the clear epoch `since`.
  ReserveAnswer reserve_since(uint64_t since, const TestPage& page) {
    return reserve_as(page, 0, page.witness(), since);
  }
  ReserveAnswer reserve_as(const TestPage& page, uint32_t shard, std::span<const std::byte> witness,
                           std::optional<uint64_t> since = {}) {
    const Reserve fields{page.key,
                         page.parent,
                         page.position,
                         shard,
                         static_cast<uint32_t>(WitnessKind::tokens),
                         static_cast<uint32_t>(witness.size())};
    const std::array<ReserveRequest, 1> requests{{{&fields, witness.data()}}};
    std::vector<SealAnswer> sealed;
    std::vector<ReserveAnswer> answers;
    (*world_)->exchange(id(), {shape_.id, since}, {}, requests, sealed, answers);
    return answers.at(0);
  }
  std::byte* place(SlotId slot, uint32_t shard) const {
    const SlabLayout layout = view_->slots().layout(view_->slots().slab_of(slot));
    return view_->payload(slot, layout) + shard * shape_.shard_stride();
  }
  // The copy of a store: into the granted slot, through this peer's own mapping.
  uint64_t copy(const ReserveAnswer& grant, const TestPage& page, uint32_t shard = 0) {
    std::vector<std::byte> data = bytes_of(page.key, shard, shape_.shard_bytes);
    const std::array<Piece, 1> pieces{{{data.data(), data.size()}}};
    return gather_digest(place(grant.slot, shard), pieces, page.key, shard);
  }
  Reason seal(const ReserveAnswer& grant, uint32_t shard, uint64_t digest) {
    const std::array<Seal, 1> seals{{{grant.generation, digest, grant.slot, shard}}};
    std::vector<SealAnswer> sealed;
    std::vector<ReserveAnswer> answers;
    (*world_)->exchange(id(), shape_.id, seals, {}, sealed, answers);
    return sealed.at(0).reason;
  }
  void settle(const ReserveAnswer& grant, uint32_t shard = 0) {
    const std::array<SlotRef, 1> refs{{{grant.generation, grant.slot, shard}}};
    (*world_)->settle(id(), refs);
  }
  // All shards of a page. False when any of them was not granted or not taken.
  bool store(const TestPage& page) {
    bool all = true;
    for (uint32_t shard = 0; shard < shape_.shards && all; ++shard) {
      const ReserveAnswer grant = reserve(page, shard);
      if (grant.answer == Answer::already) continue;
      all = grant.answer == Answer::granted &&
            seal(grant, shard, copy(grant, page, shard)) == Reason::none;
    }
    return all;
  }

  // Pages of one shard, in one exchange each way. False when any was not granted or not taken.
  bool store_all(std::span<const TestPage> pages) { return store_some(pages) == pages.size(); }
  // Returns how many were taken.
  size_t store_some(std::span<const TestPage> pages) {
    std::vector<Reserve> fields;
    for (const TestPage& page : pages)
      fields.push_back({page.key, page.parent, page.position, 0,
                        static_cast<uint32_t>(WitnessKind::tokens),
                        static_cast<uint32_t>(page.witness().size())});
    std::vector<ReserveRequest> requests;
    for (size_t at = 0; at < pages.size(); ++at)
      requests.push_back({&fields[at], pages[at].witness().data()});
    std::vector<SealAnswer> sealed;
    std::vector<ReserveAnswer> answers;
    (*world_)->exchange(id(), shape_.id, {}, requests, sealed, answers);
    std::vector<Seal> seals;
    for (size_t at = 0; at < pages.size(); ++at) {
      if (answers[at].answer != Answer::granted) continue;
      const uint64_t digest = copy(answers[at], pages[at]);
      seals.push_back({answers[at].generation, digest, answers[at].slot, 0});
    }
    answers.clear();
    (*world_)->exchange(id(), shape_.id, seals, {}, sealed, answers);
    return static_cast<size_t>(std::ranges::count(sealed, Reason::none, &SealAnswer::reason));
  }

  LoadResult load_entry(const EntryView& entry, const TestPage& page, uint32_t shard,
                        std::vector<std::byte>& data, bool verify = true) const {
    data.assign(shape_.shard_bytes, std::byte{0xcd});
    const std::array<Piece, 1> pieces{{{data.data(), data.size()}}};
    const Expected expected{shape_.id,           page.key,      page.parent, page.position,
                            WitnessKind::tokens, page.witness()};
    return view_->load(entry, expected, shape_, shard, pieces, verify);
  }
  Got load_as(const EntryView& entry, const TestPage& page, uint32_t shard) const {
    std::vector<std::byte> data;
    switch (load_entry(entry, page, shard, data)) {
      case LoadResult::stale:
        return Got::stale;
      case LoadResult::mismatch:
        return Got::mismatch;
      default:
        return data == bytes_of(page.key, shard, shape_.shard_bytes) ? Got::right : Got::wrong;
    }
  }
  Got load(const TestPage& page, uint32_t shard = 0) const {
    const auto entry = view_->index().find(page.key);
    return entry && entry->in_dram() ? load_as(*entry, page, shard) : Got::missing;
  }
  void report(const EntryView& entry, uint32_t shard = 0) {
    (*world_)->report(id(),
                      {entry.key, view_->slots().load(entry.slot).generation, entry.slot, shard});
  }

  // Pin, fence, check (pin_pages); the place of the pin, or -1 where it came too late.
  int pin(const TestPage& page) {
    const auto entry = view_->index().find(page.key);
    if (!entry) return -1;
    const int at = store_pin(*entry);
    return confirm_pin(*entry, at) ? at : -1;
  }
  int store_pin(const EntryView& entry) {
    const int at = session_->take_pin();
    session_->store_pin(at, slot_pin(entry.slot, entry.generation));
    full_fence();
    return at;
  }
  bool confirm_pin(const EntryView& entry, int at) {
    if (view_->is_live(entry.slot, entry.generation)) return true;
    session_->drop_pin(at);
    return false;
  }

  // The socket is gone, the process is not.
  void hang_up() { (*world_)->sessions().hung_up(id()); }
  // The process is gone: the kernel closes its descriptors, and that ends the lock.
  void die() {
    const SessionId gone = id();
    session_.reset();
    lock_.reset();
    if (world_->operator->() != nullptr) (*world_)->sessions().hung_up(gone);
  }
  // hello again after a restart; what is listed as not settled.
  std::vector<SlotRef> hello() {
    if ((*world_)->sessions().find(id(), 1) == nullptr)
      throw check::Failure("the session is not known any more");
    map();
    return (*world_)->unsettled(id());
  }

 private:
  World* world_;
  NamespaceShape shape_;
  Fd lock_;  // the session's lock, also in a forked child that plays this client
  std::unique_ptr<ClientSession> session_;
  std::shared_ptr<const View> view_;
};

}  // namespace kvw
