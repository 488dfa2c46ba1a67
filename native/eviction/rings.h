// Lists of nodes from cold to hot, each a ring through a head of its own. Nodes and heads lie in
// one vector and link by their places in it, `colder` and `hotter`: whose they are, and what they
// say of a node in no list, is its user's.
#pragma once

#include <cstdint>

namespace kvw::rings {

template <class Nodes>
void make_head(Nodes& nodes, uint32_t head) {
  nodes[head].colder = nodes[head].hotter = head;
}

// The head itself where there is none.
template <class Nodes>
uint32_t coldest(const Nodes& nodes, uint32_t head) {
  return nodes[head].hotter;
}

template <class Nodes>
void link_between(Nodes& nodes, uint32_t place, uint32_t colder, uint32_t hotter) {
  nodes[place].colder = colder;
  nodes[place].hotter = hotter;
  nodes[colder].hotter = place;
  nodes[hotter].colder = place;
}

template <class Nodes>
void push_hot(Nodes& nodes, uint32_t head, uint32_t place) {
  link_between(nodes, place, nodes[head].colder, head);
}

template <class Nodes>
void push_cold(Nodes& nodes, uint32_t head, uint32_t place) {
  link_between(nodes, place, head, nodes[head].hotter);
}

// Out of its list. Its own links stay as they are.
template <class Nodes>
void take_out(Nodes& nodes, uint32_t place) {
  nodes[nodes[place].colder].hotter = nodes[place].hotter;
  nodes[nodes[place].hotter].colder = nodes[place].colder;
}

}  // namespace kvw::rings
