// No page that stays loses an ancestor to an eviction, whatever is pinned, written or stored
// meanwhile: nobody would find it any more.
#include <map>
#include <set>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/operator_eviction.h"
#include "warehouse/warehouse.h"

namespace kvw {
namespace {

TestPage page_below(const TestPage* parent, uint64_t number) {
  TestPage page;
  page.key = {mixed(number), mixed(~number)};
  page.parent = parent == nullptr ? Key{} : parent->key;
  page.position = parent == nullptr ? 0 : parent->position + 1;
  page.tokens.assign(16, static_cast<uint32_t>(number));
  return page;
}

class Tree {
 public:
  Tree(std::mt19937_64& random, bool nvme) : random_(random), world_(shape_of(4096, 1), 8 * kMiB) {
    if (nvme) world_.options.nvme_dir = world_.directory.path() + "/nvme";
    world_.options.nvme_capacity_bytes = 32 * kMiB;
    world_.options.io_engine = "pread";
    world_.start();
    client_ = std::make_unique<Peer>(world_);
  }

  // Below a random page, or a new prompt; sometimes the client does not come to its seal.
  void grow() {
    const TestPage* parent = below(10) == 0 ? nullptr : any();
    const TestPage page = page_below(parent, next_++);
    const ReserveAnswer grant = client_->reserve(page);
    if (grant.answer != Answer::granted) return;
    if (below(8) == 0) {
      open_.emplace_back(grant, page);
      return;
    }
    if (client_->seal(grant, 0, client_->copy(grant, page)) == Reason::none) pages_.push_back(page);
  }
  void seal_open() {
    for (const auto& [grant, page] : open_)
      if (client_->seal(grant, 0, client_->copy(grant, page)) == Reason::none)
        pages_.push_back(page);
    open_.clear();
  }
  void write() {
    while (world_->has_log() && world_->status().log.queued_records != 0) world_->poll_log();
  }
  void pin() {
    const TestPage* page = any();
    if (page == nullptr || pins_.contains(page->key.lo)) return;
    const auto entry = world_.entry(*page);
    if (!entry || !entry->in_dram()) return;
    if (const int at = client_->pin(*page); at >= 0) pins_[page->key.lo] = {at, *page};
  }
  void unpin() {
    for (auto at = pins_.begin(); at != pins_.end();) {
      if (below(2) == 0) {
        ++at;
        continue;
      }
      client_->session().drop_pin(at->second.first);
      at = pins_.erase(at);
    }
  }

  void evict() {
    const std::set<uint64_t> before = gaps();
    const char* tiers = std::array{"dram", "all", "nvme"}[below(world_->has_log() ? 3 : 2)];
    OperatorEviction eviction =
        world_->begin_eviction(below(2) == 0 ? -1 : 0, 1 + below(pages_.size() + 1), tiers);
    while (eviction.step())
      if (below(4) == 0) grow();
    check(before);
  }
  // For room.
  void crowd() {
    const std::set<uint64_t> before = gaps();
    for (uint64_t count = below(1000); count > 0; --count)
      client_->store(page_below(nullptr, next_++));
    check(before);
  }

  // Pages without their parent.
  std::set<uint64_t> gaps() {
    std::set<uint64_t> found;
    for (const TestPage& page : pages_) {
      const TestPage parent{.key = page.parent, .parent = {}, .tokens = {}};
      if (page.position > 0 && world_.stored(page) && !world_.stored(parent))
        found.insert(page.key.lo);
    }
    return found;
  }
  void check(const std::set<uint64_t>& before) {
    seal_open();
    for (const uint64_t key : gaps()) CHECK(before.contains(key));
    for (const auto& [key, pin] : pins_) CHECK_EQ(client_->load(pin.second), Got::right);
    world_->sweep(SIZE_MAX);
    std::erase_if(pages_, [&](const TestPage& page) { return !world_.stored(page); });
  }

  uint64_t below(uint64_t bound) { return random_() % bound; }

 private:
  const TestPage* any() { return pages_.empty() ? nullptr : &pages_[below(pages_.size())]; }

  std::mt19937_64& random_;
  World world_;
  std::unique_ptr<Peer> client_;
  std::vector<TestPage> pages_;
  std::vector<std::pair<ReserveAnswer, TestPage>> open_;
  std::map<uint64_t, std::pair<int, TestPage>> pins_;
  uint64_t next_ = 1;
};

TEST(no_page_that_stays_loses_an_ancestor_to_an_eviction_beside_pins_and_stores) {
  std::mt19937_64 random = check::random("chains");
  for (int life = 0; life < 10; ++life) {
    const bool nvme = life % 2 == 0;
    Tree tree(random, nvme);
    for (int round = 0; round < 20; ++round) {
      for (int page = 0; page < 60; ++page) tree.grow();
      if (tree.below(2) == 0) tree.write();
      for (uint64_t pins = tree.below(20); pins > 0; --pins) tree.pin();
      tree.seal_open();
      if (!nvme && tree.below(2) == 0)
        tree.crowd();
      else
        tree.evict();
      tree.unpin();
    }
  }
}

// A page that everybody's prompts begin with was damaged and stored again. Its policy hears of so
// many children at once, and it left with the last of those.
TEST(page_that_comes_after_more_children_than_its_policy_is_told_of_stays_with_them) {
  World world(shape_of(4096, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  const TestPage parent = page_below(nullptr, 1);
  CHECK(peer.store(parent));
  std::vector<TestPage> children;
  for (uint64_t number = 2; number < 2002; ++number)
    children.push_back(page_below(&parent, number));
  for (const TestPage& child : children) CHECK(peer.store(child));
  world.payload(world.slot_of(parent))[7] ^= std::byte{1};
  peer.report(*world.entry(parent));
  while (world.stored(parent)) world->go_on();
  CHECK(peer.store(parent));
  CHECK(world.stored(children.front()));
  // Those that it was not told of are used, and the others make room.
  for (size_t at = 0; at < 900; ++at) {
    peer.session().touch(*world.entry(children[at]));
    if (at % 100 == 99) world.pass(1);
  }
  const auto stored = [&](const TestPage& page) { return world.stored(page); };
  for (uint64_t number = 10000; std::ranges::any_of(children, stored); ++number) {
    CHECK(world.stored(parent));
    CHECK(peer.store(page_below(nullptr, number)));
  }
}

}  // namespace
}  // namespace kvw
