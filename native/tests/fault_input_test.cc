// Hostile input in process: the corpus of every fuzz target, then changes of it that follow from
// the seed. `make fuzz` runs the same targets for longer, under sanitizers and guided by coverage.
#include <string>

#include "fuzz/mutator.h"
#include "tests/check.h"
#include "tests/tally.h"

// Each target's LLVMFuzzerTestOneInput, under a name of its own (cmake/tests.cmake).
extern "C" {
int fuzz_messages(const uint8_t* data, size_t size);
int fuzz_objects(const uint8_t* data, size_t size);
int fuzz_records(const uint8_t* data, size_t size);
int fuzz_segment(const uint8_t* data, size_t size);
int fuzz_server(const uint8_t* data, size_t size);
int fuzz_sessions(const uint8_t* data, size_t size);
int fuzz_slots(const uint8_t* data, size_t size);
}

namespace kvw {
namespace {

void feed(const std::string& name, int (*target)(const uint8_t*, size_t), uint64_t usual) {
  const auto corpus = fuzz::read_corpus(std::string(KVW_FUZZ_CORPUS "/") + name);
  CHECK(!corpus.empty());
  for (const fuzz::Bytes& input : corpus) CHECK_EQ(target(input.data(), input.size()), 0);
  auto random = check::random(name);
  fuzz::Mutator mutator(corpus, random());
  const uint64_t rounds = check::rounds(usual);
  for (uint64_t round = 0; round < rounds; ++round) {
    const fuzz::Bytes input = mutator.next();
    CHECK_EQ(target(input.data(), input.size()), 0);
  }
  const uint64_t inputs = corpus.size() + rounds;
  std::printf("(%s inputs) ", std::to_string(inputs).c_str());
  check::tally("hostile input: " + name, inputs);
}

TEST(message_of_noise_is_read_within_its_bounds) { feed("messages", fuzz_messages, 20000); }
TEST(record_or_table_of_noise_is_decoded_within_its_bounds) {
  feed("records", fuzz_records, 20000);
}
TEST(object_of_noise_gives_nothing_but_its_own_pages) { feed("objects", fuzz_objects, 5000); }
TEST(segment_of_noise_gives_nothing_but_whole_records) { feed("segment", fuzz_segment, 2000); }
TEST(slots_file_of_noise_gives_no_wrong_page) { feed("slots", fuzz_slots, 300); }
TEST(session_file_of_noise_is_read_within_its_bounds) { feed("sessions", fuzz_sessions, 500); }
TEST(peer_of_noise_harms_neither_daemon_nor_others) { feed("server", fuzz_server, 500); }

}  // namespace
}  // namespace kvw
