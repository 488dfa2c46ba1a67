// main() of a fuzz target where there is no libFuzzer; its options are a few of libFuzzer's own:
//
//   NAME [-max_total_time=S] [-seed=N] [-artifact_prefix=PATH] [CORPUS or FILE...]
//
// Replays the corpora, then changes them for S seconds. The input that ends it lies in
// PATH + "last-input", which is written before each run.
#include <fcntl.h>
#include <sys/mman.h>

#include <chrono>
#include <string_view>

#include "base/fd.h"
#include "fuzz/mutator.h"
#include "fuzz/target.h"

namespace {

using kvw::fuzz::Bytes;

// A file that outlives an abort: its length, then the input.
class Last {
 public:
  explicit Last(const std::string& path)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    if (!file_.valid()) std::exit(2);
  }
  void keep(const Bytes& input) {
    const bool kept = ::ftruncate(file_.get(), static_cast<off_t>(input.size())) == 0 &&
                      ::pwrite(file_.get(), input.data(), input.size(), 0) >= 0;
    if (!kept) std::exit(2);
  }

 private:
  kvw::Fd file_;
};

uint64_t number_after(std::string_view option, size_t from) {
  return std::strtoull(option.data() + from, nullptr, 10);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seconds = 0, seed = 1;
  std::string prefix = "./";
  std::vector<Bytes> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option.starts_with("-max_total_time=")) {
      seconds = number_after(option, 16);
    } else if (option.starts_with("-seed=")) {
      seed = number_after(option, 6);
    } else if (option.starts_with("-artifact_prefix=")) {
      prefix = option.substr(17);
    } else if (!option.starts_with("-")) {
      const auto more = kvw::fuzz::read_corpus(std::string(option));
      corpus.insert(corpus.end(), more.begin(), more.end());
    }
  }
  Last last(prefix + "last-input");
  uint64_t runs = 0;
  const auto run = [&](const Bytes& input) {
    last.keep(input);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs;
  };
  for (const Bytes& input : corpus) run(input);
  kvw::fuzz::Mutator mutator(corpus, seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (std::chrono::steady_clock::now() < end) run(mutator.next());
  std::printf("Done %llu runs, seed %llu\n", static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
  return 0;
}
