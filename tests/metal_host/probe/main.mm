#include <unistd.h>

#include <cstring>
#include <initializer_list>

#include "probe.h"

int main(int count, char** words) {
  for (const Scenario* list : {objc_scenarios, metal_scenarios})
    for (const Scenario* s = list; s->name; s++)
      if (count > 1 && strcmp(s->name, words[1]) == 0) {
        s->run();
        // A queue's thread may still be dropping the last command buffer.
        for (int wait = 0; wait < 1000 && lily_objc_live_objects(); wait++) usleep(1000);
        printf("live %ld\n", lily_objc_live_objects());
        return 0;
      }
  fprintf(stderr, "no such scenario\n");
  return 2;
}
