#include "parallel.h"

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace hop_tf {
namespace {

int CountCores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
#endif
  for (const char* name : {"TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    const int limit = text != nullptr ? std::atoi(text) : 0;
    if (limit > 0) cores = std::min(cores, limit);
  }
  return std::max(cores, 1);
}

}  // namespace

int NumCores() {
  static const int cores = CountCores();
  return cores;
}

int NumParts(int64_t num_items, int64_t min_items_per_part, int num_threads) {
  const int64_t most = num_threads > 0 ? num_threads : NumCores();
  return static_cast<int>(std::clamp<int64_t>(num_items / min_items_per_part, 1, most));
}

void ParallelFor(int64_t num_items, int num_parts, int64_t granularity,
                 const std::function<void(int part, int64_t begin, int64_t end)>& body) {
  const int64_t num_grains = (num_items + granularity - 1) / granularity;
  const auto boundary = [&](int part) { return std::min(num_grains * part / num_parts * granularity, num_items); };
  const auto run = [&](int part) { body(part, boundary(part), boundary(part + 1)); };
  std::vector<std::thread> threads;
  threads.reserve(num_parts - 1);
  int part = 1;
  try {
    for (; part < num_parts; ++part) threads.emplace_back(run, part);
  } catch (const std::system_error&) {
    for (; part < num_parts; ++part) run(part);
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hop_tf
